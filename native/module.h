// What the parts of the Python module share: arguments from Python, checked, and the store.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "attention.h"
#include "dispatch.h"
#include "linear.h"

namespace pagedkv {

namespace nb = nanobind;

// Each adds its classes and functions to the module. The decoder's take the store's as arguments.
void bind_attention(nb::module_& m);
void bind_decoder(nb::module_& m);

using Tensor = nb::ndarray<nb::device::cpu>;
template <typename T, size_t N>
using Array = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

[[noreturn]] inline void refuse(const std::string& message) {
  throw std::invalid_argument(message);
}

inline DType dtype_of(const Tensor& tensor, const char* name) {
  const nb::dlpack::dtype dtype = tensor.dtype();
  const auto code = static_cast<nb::dlpack::dtype_code>(dtype.code);
  if (dtype == nb::dtype<float>()) return DType::kFloat32;
  if (code == nb::dlpack::dtype_code::Bfloat && dtype.bits == 16) return DType::kBfloat16;
  refuse(std::string(name) + " must be float32 or bfloat16");
}

inline DType dtype_named(const std::string& name) {
  if (name == "float32") return DType::kFloat32;
  if (name == "bfloat16") return DType::kBfloat16;
  refuse("dtype='" + name + "' must be 'float32' or 'bfloat16'");
}

inline std::byte* bytes_of(const Tensor& tensor) { return static_cast<std::byte*>(tensor.data()); }

template <typename T, typename... Constraints>
std::vector<T> vector_of(const nb::ndarray<const T, Constraints...>& array) {
  return std::vector<T>(array.data(), array.data() + array.size());
}

inline void require_shape(const Tensor& tensor, const char* name,
                          const std::vector<int64_t>& shape) {
  bool equal = tensor.ndim() == shape.size();
  for (size_t i = 0; equal && i < shape.size(); ++i) {
    equal = static_cast<int64_t>(tensor.shape(i)) == shape[i];
  }
  if (equal) return;
  std::string wanted;
  for (int64_t n : shape) wanted += (wanted.empty() ? "" : ", ") + std::to_string(n);
  refuse(std::string(name) + " must have shape [" + wanted + "]");
}

inline void require_contiguous(const Tensor& tensor, const char* name) {
  int64_t stride = 1;
  for (size_t i = tensor.ndim(); i-- > 0; stride *= static_cast<int64_t>(tensor.shape(i))) {
    if (tensor.shape(i) > 1 && tensor.stride(i) != stride) {
      refuse(std::string(name) + " must be contiguous");
    }
  }
}

// A matrix argument as rows, after its columns and type were checked against the weights'.
inline Rows rows_of(const Tensor& tensor, const char* name, int64_t columns, DType dtype) {
  if (tensor.ndim() != 2) {
    refuse(std::string(name) + " must have 2 dimensions, not " + std::to_string(tensor.ndim()));
  }
  if (static_cast<int64_t>(tensor.shape(1)) != columns) {
    refuse(std::string(name) + " has " + std::to_string(tensor.shape(1)) + " columns, not " +
           std::to_string(columns));
  }
  if (dtype_of(tensor, name) != dtype) {
    refuse(std::string(name) + " differs from the weight's type");
  }
  if (columns > 1 && tensor.stride(1) != 1) {
    refuse(std::string(name) + " must be contiguous in its last dimension; its stride is " +
           std::to_string(tensor.stride(1)));
  }
  return {bytes_of(tensor), tensor.stride(0)};
}

// A copy of a float32 vector.
inline std::vector<float> floats_of(const Tensor& tensor, const char* name, int64_t count) {
  require_shape(tensor, name, {count});
  require_contiguous(tensor, name);
  if (dtype_of(tensor, name) != DType::kFloat32) refuse(std::string(name) + " must be float32");
  const float* values = reinterpret_cast<const float*>(bytes_of(tensor));
  return std::vector<float>(values, values + count);
}

// The store as Python sees it: keeps the tensor alive that holds K and V.
class PyStore {
 public:
  PyStore(Tensor memory, int64_t num_layers, int64_t num_blocks, int64_t block_size,
          int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, const std::string& dtype,
          float scale, const std::string& isa)
      : memory_(memory),
        attention_(make_store(memory, {num_layers, num_blocks + 1, num_kv_heads, block_size,
                                       round_up(head_dim, kLanes), step_of(dtype_named(dtype))},
                              head_dim, dtype_named(dtype)),
                   kernels_for(isa, dtype_named(dtype)), num_heads, scale) {
    if (num_heads < 1 || num_heads % num_kv_heads) {
      refuse("num_heads=" + std::to_string(num_heads) + " must be a multiple of num_kv_heads");
    }
  }

  Attention& attention() { return attention_; }
  const Store& store() const { return attention_.store(); }

  std::vector<int64_t> canonical_shape(int64_t count) const {
    const Layout& layout = store().layout;
    return {count, layout.num_layers, 2, layout.block_size, layout.num_kv_heads, store().head_dim};
  }

 private:
  static Store make_store(const Tensor& memory, const Layout& layout, int64_t head_dim,
                          DType dtype) {
    if (layout.num_layers < 1 || layout.num_blocks_and_null < 2 || layout.num_kv_heads < 1 ||
        layout.block_size < 1 || head_dim < 1 || head_dim > kMaxHeadDim) {
      refuse("a store has at least one layer, block, slot and head of 1 to " +
             std::to_string(kMaxHeadDim));
    }
    require_shape(memory, "memory", {layout.num_layers * layout.layer_stride() * size_of(dtype)});
    if (memory.dtype() != nb::dtype<uint8_t>()) refuse("memory must be uint8");
    return {bytes_of(memory), dtype, layout, head_dim};
  }

  Tensor memory_;
  Attention attention_;
};

}  // namespace pagedkv

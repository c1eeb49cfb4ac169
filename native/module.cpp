// The Python module pagedkv._native. Every function that may take long releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <omp.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "activation.h"
#include "attention.h"
#include "dispatch.h"
#include "linear.h"
#include "memory.h"

namespace nb = nanobind;

namespace pagedkv {
namespace {

using Tensor = nb::ndarray<nb::device::cpu>;
template <typename T, size_t N>
using Array = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

DType dtype_of(const Tensor& tensor, const char* name) {
  const nb::dlpack::dtype dtype = tensor.dtype();
  const auto code = static_cast<nb::dlpack::dtype_code>(dtype.code);
  if (dtype == nb::dtype<float>()) return DType::kFloat32;
  if (code == nb::dlpack::dtype_code::Bfloat && dtype.bits == 16) return DType::kBfloat16;
  refuse(std::string(name) + " must be float32 or bfloat16");
}

DType dtype_named(const std::string& name) {
  if (name == "float32") return DType::kFloat32;
  if (name == "bfloat16") return DType::kBfloat16;
  refuse("dtype='" + name + "' must be 'float32' or 'bfloat16'");
}

std::byte* bytes_of(const Tensor& tensor) { return static_cast<std::byte*>(tensor.data()); }

template <typename T, typename... Constraints>
std::vector<T> vector_of(const nb::ndarray<const T, Constraints...>& array) {
  return std::vector<T>(array.data(), array.data() + array.size());
}

void require_shape(const Tensor& tensor, const char* name, const std::vector<int64_t>& shape) {
  bool equal = tensor.ndim() == shape.size();
  for (size_t i = 0; equal && i < shape.size(); ++i) {
    equal = static_cast<int64_t>(tensor.shape(i)) == shape[i];
  }
  if (equal) return;
  std::string wanted;
  for (int64_t n : shape) wanted += (wanted.empty() ? "" : ", ") + std::to_string(n);
  refuse(std::string(name) + " must have shape [" + wanted + "]");
}

void require_contiguous(const Tensor& tensor, const char* name) {
  int64_t stride = 1;
  for (size_t i = tensor.ndim(); i-- > 0; stride *= static_cast<int64_t>(tensor.shape(i))) {
    if (tensor.shape(i) > 1 && tensor.stride(i) != stride) {
      refuse(std::string(name) + " must be contiguous");
    }
  }
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

Tokens tokens_of(const Tensor& tensor, const char* name, DType dtype, int64_t tokens,
                 int64_t heads, int64_t dim) {
  require_shape(tensor, name, {tokens, heads, dim});
  if (dtype_of(tensor, name) != dtype) refuse(std::string(name) + " differs from the store's type");
  if (dim > 1 && tensor.stride(2) != 1) {
    refuse(std::string(name) + " must be contiguous in its last dimension");
  }
  return {bytes_of(tensor), tensor.stride(0), tensor.stride(1)};
}

void run(PyStore& self, const Plan& plan, int64_t layer, Tensor q, Tensor k, Tensor v,
         Tensor out) {
  const Store& store = self.store();
  const int64_t tokens = static_cast<int64_t>(plan.slots().size());
  const int64_t heads = self.attention().shape().num_heads;
  const int64_t kv_heads = store.layout.num_kv_heads;
  if (layer < 0 || layer >= store.layout.num_layers) {
    refuse("layer=" + std::to_string(layer) + " is not in the store");
  }
  const Tokens qs = tokens_of(q, "q", store.dtype, tokens, heads, store.head_dim);
  const Tokens ks = tokens_of(k, "k", store.dtype, tokens, kv_heads, store.head_dim);
  const Tokens vs = tokens_of(v, "v", store.dtype, tokens, kv_heads, store.head_dim);
  const Tokens outs = tokens_of(out, "out", store.dtype, tokens, heads, store.head_dim);
  nb::gil_scoped_release release;
  self.attention().run(plan, layer, qs, ks, vs, outs);
}

void make_plan(Plan* self, PyStore& store, Array<int32_t, 1> query_lens,
               Array<int32_t, 1> context_lens, Array<int32_t, 2> tables, Array<int64_t, 1> slots,
               int num_threads, bool share) {
  new (self) Plan(store.attention().shape(), vector_of(query_lens), vector_of(context_lens),
                  vector_of(tables), static_cast<int64_t>(tables.shape(1)), vector_of(slots),
                  num_threads, share);
  store.attention().prepare(*self);
}

void py_copy_blocks(PyStore& self, Array<int64_t, 2> copies) {
  if (copies.shape(1) != 3) refuse("copies must be [c, 3]");
  nb::gil_scoped_release release;
  copy_blocks(self.store(), copies.data(), static_cast<int64_t>(copies.shape(0)));
}

void py_read_blocks(PyStore& self, Array<int64_t, 1> ids, Tensor out) {
  const int64_t count = static_cast<int64_t>(ids.size());
  require_shape(out, "out", self.canonical_shape(count));
  require_contiguous(out, "out");
  nb::gil_scoped_release release;
  read_blocks(self.store(), ids.data(), count, bytes_of(out));
}

void py_write_blocks(PyStore& self, Array<int64_t, 1> ids, Tensor data) {
  const int64_t count = static_cast<int64_t>(ids.size());
  require_shape(data, "data", self.canonical_shape(count));
  require_contiguous(data, "data");
  nb::gil_scoped_release release;
  write_blocks(self.store(), ids.data(), count, bytes_of(data));
}

void py_silu_mul(Tensor gate_up, Tensor out, const std::string& isa) {
  const DType dtype = dtype_of(gate_up, "gate_up");
  if (gate_up.ndim() != 2 || gate_up.shape(1) % 2) refuse("gate_up must be [T, 2 * I]");
  const int64_t rows = static_cast<int64_t>(gate_up.shape(0));
  const int64_t width = static_cast<int64_t>(gate_up.shape(1)) / 2;
  require_shape(out, "out", {rows, width});
  if (dtype_of(out, "out") != dtype) refuse("out must have gate_up's type");
  if (width > 0 && (gate_up.stride(1) != 1 || (width > 1 && out.stride(1) != 1))) {
    refuse("gate_up and out must be contiguous in their last dimension");
  }
  const Kernels& kernels = kernels_for(isa, dtype);
  nb::gil_scoped_release release;
  silu_mul(kernels, dtype, {bytes_of(gate_up), gate_up.stride(0)},
           {bytes_of(out), out.stride(0)}, rows, width);
}

// A matrix argument as rows, after its columns and type were checked against the weights'.
Rows rows_of(const Tensor& tensor, const char* name, int64_t columns, DType dtype) {
  if (tensor.ndim() != 2) {
    refuse(std::string(name) + " must have 2 dimensions, not " + std::to_string(tensor.ndim()));
  }
  if (static_cast<int64_t>(tensor.shape(1)) != columns) {
    refuse(std::string(name) + " has " + std::to_string(tensor.shape(1)) + " columns, not " +
           std::to_string(columns));
  }
  if (dtype_of(tensor, name) != dtype) refuse(std::string(name) + " differs from the weight's type");
  if (columns > 1 && tensor.stride(1) != 1) {
    refuse(std::string(name) + " must be contiguous in its last dimension; its stride is " +
           std::to_string(tensor.stride(1)));
  }
  return {bytes_of(tensor), tensor.stride(0)};
}

void make_matrix(PackedMatrix* self, int64_t rows, int64_t columns, const std::string& dtype) {
  if (rows < 1 || columns < 1) {
    refuse("a matrix of " + std::to_string(rows) + " rows and " + std::to_string(columns) +
           " columns is empty");
  }
  new (self) PackedMatrix(rows, columns, dtype_named(dtype));
}

void py_write_rows(PackedMatrix& self, int64_t first, Tensor source) {
  const Rows rows = rows_of(source, "source", self.columns(), self.dtype());
  const int64_t count = static_cast<int64_t>(source.shape(0));
  if (first < 0 || first > self.rows() - count) {
    refuse("rows " + std::to_string(first) + " to " + std::to_string(first + count) +
           " are not in a matrix of " + std::to_string(self.rows()));
  }
  nb::gil_scoped_release release;
  self.write(first, count, rows);
}

void py_gather(const PackedMatrix& self, Array<int64_t, 1> ids, Tensor out) {
  const int64_t count = static_cast<int64_t>(ids.size());
  const Rows rows = rows_of(out, "out", self.columns(), self.dtype());
  require_shape(out, "out", {count, self.columns()});
  for (int64_t i = 0; i < count; ++i) {
    if (ids.data()[i] < 0 || ids.data()[i] >= self.rows()) {
      refuse("row " + std::to_string(ids.data()[i]) + " is not in a matrix of " +
             std::to_string(self.rows()));
    }
  }
  nb::gil_scoped_release release;
  self.gather(ids.data(), count, rows);
}

// A linear layer as Python sees it: shares the weights, keeps the bias in float32.
class PyLinear {
 public:
  PyLinear(std::shared_ptr<PackedMatrix> weight, std::optional<Tensor> bias,
           const std::string& isa)
      : weight_(std::move(weight)), kernels_(linear_kernels_for(isa, weight_->dtype())) {
    if (!bias) return;
    require_shape(*bias, "bias", {weight_->rows()});
    require_contiguous(*bias, "bias");
    if (dtype_of(*bias, "bias") != DType::kFloat32) refuse("bias must be float32");
    const float* values = reinterpret_cast<const float*>(bytes_of(*bias));
    bias_.assign(values, values + weight_->rows());
    bias_.resize(round_up(weight_->rows(), kPanel));
  }

  void run(Tensor x, Tensor out) const {
    const Rows from = rows_of(x, "x", weight_->columns(), weight_->dtype());
    const Rows to = rows_of(out, "out", weight_->rows(), weight_->dtype());
    const int64_t rows = static_cast<int64_t>(x.shape(0));
    require_shape(out, "out", {rows, weight_->rows()});
    nb::gil_scoped_release release;
    linear(kernels_, *weight_, bias_.empty() ? nullptr : bias_.data(), from, to, rows);
  }

 private:
  std::shared_ptr<PackedMatrix> weight_;
  const LinearKernels& kernels_;
  std::vector<float> bias_;
};

struct Extent {
  std::byte* memory;
  size_t bytes;
};

nb::ndarray<nb::pytorch, uint8_t, nb::ndim<1>> allocate(size_t bytes) {
  auto* extent = new Extent{allocate_zeroed(bytes), bytes};
  nb::capsule owner(extent, [](void* p) noexcept {
    auto* held = static_cast<Extent*>(p);
    release(held->memory, held->bytes);
    delete held;
  });
  return {extent->memory, {bytes}, owner};
}

int count_threads() {
  int count = 0;
#pragma omp parallel reduction(+ : count)
  count += 1;
  return count;
}

int64_t slot_offset(int64_t block, int64_t slot, int64_t head, int64_t num_kv_heads,
                    int64_t block_size, int64_t padded_dim, const std::string& dtype) {
  const Layout layout{1, block + 1, num_kv_heads, block_size, padded_dim,
                      step_of(dtype_named(dtype))};
  return layout.key(0, block, slot, head).offset;
}

}  // namespace
}  // namespace pagedkv

NB_MODULE(_native, m) {
  using namespace pagedkv;
  using namespace nb::literals;
  m.doc() = "Paged attention on the CPU; see _native.pyi for the contract of each function.";

  nb::class_<PyStore>(m, "Store")
      .def(nb::init<Tensor, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                    const std::string&, float, const std::string&>(),
           "memory"_a.noconvert(), "num_layers"_a, "num_blocks"_a, "block_size"_a, "num_heads"_a,
           "num_kv_heads"_a, "head_dim"_a, "dtype"_a, "scale"_a, "isa"_a)
      .def("run", &run, "plan"_a, "layer"_a, "q"_a.noconvert(), "k"_a.noconvert(),
           "v"_a.noconvert(), "out"_a.noconvert())
      .def("copy_blocks", &py_copy_blocks, "copies"_a.noconvert())
      .def("read_blocks", &py_read_blocks, "ids"_a.noconvert(), "out"_a.noconvert())
      .def("write_blocks", &py_write_blocks, "ids"_a.noconvert(), "data"_a.noconvert());

  nb::class_<Plan>(m, "Plan")
      .def("__init__", &make_plan, "store"_a, "query_lens"_a.noconvert(),
           "context_lens"_a.noconvert(), "tables"_a.noconvert(), "slots"_a.noconvert(),
           "num_threads"_a, "share"_a)
      .def_prop_ro("num_threads", &Plan::num_threads)
      .def_prop_ro("num_items",
                   [](const Plan& plan) { return plan.items().size() + plan.rests().size(); })
      .def_prop_ro("num_shared_spans", &Plan::num_shared_spans);

  nb::class_<PackedMatrix>(m, "PackedMatrix")
      .def("__init__", &make_matrix, "rows"_a, "columns"_a, "dtype"_a)
      .def("write_rows", &py_write_rows, "first"_a, "source"_a.noconvert())
      .def("gather", &py_gather, "ids"_a.noconvert(), "out"_a.noconvert())
      .def_prop_ro("num_bytes", &PackedMatrix::bytes);

  nb::class_<PyLinear>(m, "Linear")
      .def(nb::init<std::shared_ptr<PackedMatrix>, std::optional<Tensor>, const std::string&>(),
           "weight"_a, "bias"_a.noconvert().none(), "isa"_a)
      .def("run", &PyLinear::run, "x"_a.noconvert(), "out"_a.noconvert());

  m.def("silu_mul", &py_silu_mul, "gate_up"_a.noconvert(), "out"_a.noconvert(), "isa"_a);
  m.def("allocate", &allocate, "bytes"_a);
  m.def("slot_offset", &slot_offset, "block"_a, "slot"_a, "head"_a, "num_kv_heads"_a,
        "block_size"_a, "padded_dim"_a, "dtype"_a);
  m.def("padded_head_dim", [](int64_t head_dim) { return round_up(head_dim, kLanes); },
        "head_dim"_a);
  m.def("isa", [] { return available_isas().back(); });
  m.def("available_isas", &available_isas);
  m.def("cpu_features", &cpu_features);
  m.def("max_threads", &omp_get_max_threads);
  m.def("count_threads", &count_threads);
}

// The Python module pagedkv._native. Every function that may take long releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/function.h>
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

#include "attention.h"
#include "decoder.h"
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

std::vector<float> floats_of(const Tensor& tensor, const char* name, int64_t count) {
  require_shape(tensor, name, {count});
  require_contiguous(tensor, name);
  if (dtype_of(tensor, name) != DType::kFloat32) refuse(std::string(name) + " must be float32");
  const float* values = reinterpret_cast<const float*>(bytes_of(tensor));
  return std::vector<float>(values, values + count);
}

Projection projection_of(std::shared_ptr<PackedMatrix> weight, const std::optional<Tensor>& bias) {
  Projection projection{std::move(weight), {}};
  if (bias) {
    projection.bias = floats_of(*bias, "bias", projection.weight->rows());
    projection.bias.resize(round_up(projection.weight->rows(), kPanel));
  }
  return projection;
}

// A decoder as Python sees it: shares the matrices, copies norms and biases.
class PyDecoder {
 public:
  PyDecoder(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, float epsilon,
            std::vector<LayerWeights> layers, Tensor norm, std::shared_ptr<PackedMatrix> head,
            const std::string& isa)
      : decoder_(config_of(num_heads, num_kv_heads, head_dim, epsilon, *head),
                 checked(std::move(layers), num_heads, num_kv_heads, head_dim, *head),
                 floats_of(norm, "norm", head->columns()), head,
                 linear_kernels_for(isa, head->dtype()), row_kernels_for(isa, head->dtype()),
                 row_kernels_for(isa, DType::kFloat32)) {}

  void forward(PyStore& store, const Plan& plan, Tensor embedded, Tensor cos, Tensor sin,
               Array<int64_t, 1> wanted, Tensor logits, std::optional<nb::callable> after_layer) {
    const Decoder::Config& config = decoder_.config();
    const Store& kv = store.store();
    const int64_t tokens = static_cast<int64_t>(plan.slots().size());
    const int64_t count = static_cast<int64_t>(wanted.size());
    if (kv.dtype != decoder_.dtype() || kv.head_dim != config.head_dim ||
        kv.layout.num_kv_heads != config.num_kv_heads ||
        kv.layout.num_layers != decoder_.num_layers() ||
        store.attention().shape().num_heads != config.num_heads) {
      refuse("the store has other layers, heads or another type than the decoder");
    }
    StepInput input{rows_of(embedded, "embedded", config.hidden, decoder_.dtype()),
                    angles_of(cos, "cos", tokens), angles_of(sin, "sin", tokens), wanted.data(),
                    count, reinterpret_cast<float*>(bytes_of(logits))};
    require_shape(embedded, "embedded", {tokens, config.hidden});
    require_shape(logits, "logits", {count, decoder_.vocabulary()});
    require_contiguous(logits, "logits");
    if (dtype_of(logits, "logits") != DType::kFloat32) refuse("logits must be float32");
    for (int64_t i = 0; i < count; ++i) {
      if (wanted.data()[i] < 0 || wanted.data()[i] >= tokens) {
        refuse("token " + std::to_string(wanted.data()[i]) + " is not one of " +
               std::to_string(tokens));
      }
    }
    Decoder::AfterLayer after;
    if (after_layer) {
      after = [&](int64_t layer, const Attended& attended) {
        nb::gil_scoped_acquire acquire;
        (*after_layer)(layer, view(attended.q, tokens, config.num_heads),
                       view(attended.k, tokens, config.num_kv_heads),
                       view(attended.v, tokens, config.num_kv_heads),
                       view(attended.out, tokens, config.num_heads));
      };
    }
    nb::gil_scoped_release release;
    decoder_.forward(store.attention(), plan, input, after);
  }

  std::map<std::string, double> profile() const {
    std::map<std::string, double> seconds;
    for (int i = 0; i < kPhases; ++i) seconds[kPhaseNames[i]] = decoder_.profile()[i];
    return seconds;
  }

 private:
  static Decoder::Config config_of(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                   float epsilon, const PackedMatrix& head) {
    if (num_kv_heads < 1 || num_heads < 1 || num_heads % num_kv_heads || head_dim < 2 ||
        head_dim % 2 || head_dim > kMaxHeadDim) {
      refuse("the heads' numbers or their size cannot be");
    }
    return {head.columns(), num_heads, num_kv_heads, head_dim, epsilon};
  }

  static std::vector<LayerWeights> checked(std::vector<LayerWeights> layers, int64_t num_heads,
                                           int64_t num_kv_heads, int64_t head_dim,
                                           const PackedMatrix& head) {
    const int64_t hidden = head.columns();
    const auto check = [&](const Projection& projection, const char* name, int64_t rows,
                           int64_t columns) {
      const PackedMatrix& weight = *projection.weight;
      if (weight.rows() != rows || weight.columns() != columns || weight.dtype() != head.dtype()) {
        refuse(std::string(name) + " must be [" + std::to_string(rows) + ", " +
               std::to_string(columns) + "] in the head's type");
      }
    };
    for (const LayerWeights& layer : layers) {
      const int64_t inner = layer.up.weight->rows();
      check(layer.qkv, "qkv", (num_heads + 2 * num_kv_heads) * head_dim, hidden);
      check(layer.output, "output", hidden, num_heads * head_dim);
      check(layer.gate, "gate", inner, hidden);
      check(layer.up, "up", inner, hidden);
      check(layer.down, "down", hidden, inner);
      for (const std::vector<float>* norm : {&layer.query_norm, &layer.key_norm}) {
        if (!norm->empty() && static_cast<int64_t>(norm->size()) != head_dim) {
          refuse("query_norm and key_norm must be [" + std::to_string(head_dim) + "]");
        }
      }
    }
    return layers;
  }

  const float* angles_of(const Tensor& tensor, const char* name, int64_t tokens) const {
    require_shape(tensor, name, {tokens, decoder_.config().head_dim / 2});
    require_contiguous(tensor, name);
    if (dtype_of(tensor, name) != DType::kFloat32) refuse(std::string(name) + " must be float32");
    return reinterpret_cast<const float*>(bytes_of(tensor));
  }

  // A tensor for as long as the call lasts.
  nb::ndarray<nb::pytorch> view(const Tokens& rows, int64_t tokens, int64_t heads) const {
    const nb::dlpack::dtype type = decoder_.dtype() == DType::kFloat32
                                       ? nb::dtype<float>()
                                       : nb::dlpack::dtype{static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat), 16, 1};
    return nb::ndarray<nb::pytorch>(
        rows.data,
        {static_cast<size_t>(tokens), static_cast<size_t>(heads),
         static_cast<size_t>(decoder_.config().head_dim)},
        nb::handle(), {rows.token_stride, rows.head_stride, 1}, type);
  }

  Decoder decoder_;
};

void make_layer(LayerWeights* self, Tensor input_norm, std::shared_ptr<PackedMatrix> qkv,
                std::shared_ptr<PackedMatrix> output, Tensor post_norm,
                std::shared_ptr<PackedMatrix> gate, std::shared_ptr<PackedMatrix> up,
                std::shared_ptr<PackedMatrix> down, std::optional<Tensor> qkv_bias,
                std::optional<Tensor> output_bias, std::optional<Tensor> gate_bias,
                std::optional<Tensor> up_bias, std::optional<Tensor> down_bias,
                std::optional<Tensor> query_norm, std::optional<Tensor> key_norm) {
  const int64_t hidden = qkv->columns();
  const auto norm_of = [](const std::optional<Tensor>& norm, const char* name) {
    return norm ? floats_of(*norm, name, static_cast<int64_t>(norm->size())) : std::vector<float>();
  };
  new (self) LayerWeights{floats_of(input_norm, "input_norm", hidden),
                          floats_of(post_norm, "post_norm", hidden),
                          norm_of(query_norm, "query_norm"),
                          norm_of(key_norm, "key_norm"),
                          projection_of(std::move(qkv), qkv_bias),
                          projection_of(std::move(output), output_bias),
                          projection_of(std::move(gate), gate_bias),
                          projection_of(std::move(up), up_bias),
                          projection_of(std::move(down), down_bias)};
}

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

  nb::class_<LayerWeights>(m, "LayerWeights")
      .def("__init__", &make_layer,
           nb::kw_only(), "input_norm"_a, "qkv"_a, "output"_a, "post_norm"_a, "gate"_a, "up"_a,
           "down"_a, "qkv_bias"_a.none(), "output_bias"_a.none(), "gate_bias"_a.none(),
           "up_bias"_a.none(), "down_bias"_a.none(), "query_norm"_a.none(), "key_norm"_a.none());

  nb::class_<PyDecoder>(m, "Decoder")
      .def(nb::init<int64_t, int64_t, int64_t, float, std::vector<LayerWeights>, Tensor,
                    std::shared_ptr<PackedMatrix>, const std::string&>(),
           nb::kw_only(), "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "epsilon"_a, "layers"_a,
           "norm"_a, "head"_a, "isa"_a)
      .def("forward", &PyDecoder::forward, "store"_a, "plan"_a, "embedded"_a.noconvert(),
           "cos"_a.noconvert(), "sin"_a.noconvert(), "wanted"_a.noconvert(),
           "logits"_a.noconvert(), "after_layer"_a.none())
      .def("profile", &PyDecoder::profile);

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

// Packed weights, linear layers and the decoder, as Python sees them.
#include <nanobind/stl/function.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <memory>
#include <optional>

#include "decoder.h"
#include "module.h"

namespace pagedkv {
namespace {

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

Projection projection_of(std::shared_ptr<PackedMatrix> weight, const std::optional<Tensor>& bias) {
  Projection projection{std::move(weight), {}};
  if (bias) {
    projection.bias = floats_of(*bias, "bias", projection.weight->rows());
    projection.bias.resize(round_up(projection.weight->rows(), kPanel));
  }
  return projection;
}

// A linear layer as Python sees it: shares the weights, keeps the bias in float32.
class PyLinear {
 public:
  PyLinear(std::shared_ptr<PackedMatrix> weight, const std::optional<Tensor>& bias,
           const std::string& isa)
      : projection_(projection_of(std::move(weight), bias)),
        kernels_(linear_kernels_for(isa, projection_.weight->dtype())) {}

  void run(Tensor x, Tensor out) const {
    const PackedMatrix& weight = *projection_.weight;
    const Rows from = rows_of(x, "x", weight.columns(), weight.dtype());
    const Rows to = rows_of(out, "out", weight.rows(), weight.dtype());
    const int64_t rows = static_cast<int64_t>(x.shape(0));
    require_shape(out, "out", {rows, weight.rows()});
    nb::gil_scoped_release release;
    linear(kernels_, weight, projection_.bias.empty() ? nullptr : projection_.bias.data(), from, to,
           rows);
  }

 private:
  Projection projection_;
  const LinearKernels& kernels_;
};

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
               Array<int64_t, 1> wanted, Tensor logits, std::optional<nb::callable> after_layer,
               std::optional<Tensor> best) {
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
                    count, reinterpret_cast<float*>(bytes_of(logits)),
                    best ? places_of(*best, count) : nullptr};
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

  static int64_t* places_of(const Tensor& best, int64_t count) {
    require_shape(best, "best", {count});
    require_contiguous(best, "best");
    if (best.dtype() != nb::dtype<int64_t>()) refuse("best must be int64");
    return reinterpret_cast<int64_t*>(bytes_of(best));
  }

  // A tensor for as long as the call lasts.
  nb::ndarray<nb::pytorch> view(const Tokens& rows, int64_t tokens, int64_t heads) const {
    constexpr nb::dlpack::dtype kBfloat16Type{
        static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat), 16, 1};
    const bool is_float32 = decoder_.dtype() == DType::kFloat32;
    return nb::ndarray<nb::pytorch>(
        rows.data,
        {static_cast<size_t>(tokens), static_cast<size_t>(heads),
         static_cast<size_t>(decoder_.config().head_dim)},
        nb::handle(), {rows.token_stride, rows.head_stride, 1},
        is_float32 ? nb::dtype<float>() : kBfloat16Type);
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

}  // namespace

void bind_decoder(nb::module_& m) {
  using namespace nb::literals;

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
           "logits"_a.noconvert(), "after_layer"_a.none(), "best"_a.noconvert().none())
      .def("profile", &PyDecoder::profile);
}

}  // namespace pagedkv

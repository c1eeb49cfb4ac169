// The store and the plan of attention, as Python sees them.
#include <nanobind/stl/string.h>

#include "module.h"

namespace pagedkv {
namespace {

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

int64_t slot_offset(int64_t block, int64_t slot, int64_t head, int64_t num_kv_heads,
                    int64_t block_size, int64_t padded_dim, const std::string& dtype) {
  const Layout layout{1, block + 1, num_kv_heads, block_size, padded_dim,
                      step_of(dtype_named(dtype))};
  return layout.key(0, block, slot, head).offset;
}

}  // namespace

void bind_attention(nb::module_& m) {
  using namespace nb::literals;

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

  m.def("slot_offset", &slot_offset, "block"_a, "slot"_a, "head"_a, "num_kv_heads"_a,
        "block_size"_a, "padded_dim"_a, "dtype"_a);
  m.def("padded_head_dim", [](int64_t head_dim) { return round_up(head_dim, kLanes); },
        "head_dim"_a);
}

}  // namespace pagedkv

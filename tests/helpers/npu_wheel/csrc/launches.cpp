// A launch keeps the kernel of the CPU, and CPU tensors over the addresses of its arguments and results. They own nothing.
#include "launches.h"
#include "device.h"
#include "fallback.h"
#include "graphs.h"
#include <ATen/core/List.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <mutex>
#include <unordered_map>

namespace npusim {
namespace {

using fake_cann::Launch;
using fake_cann::Touch;
using Touches = std::vector<Touch>;
namespace py = pybind11;

fake_cann::Recorder& cann() {
  using Find = fake_cann::Recorder* (*)();
  static auto& found = *reinterpret_cast<Find>(dlsym(dlopen("libascendcl.so", RTLD_NOLOAD | RTLD_NOW), "fake_cann_recorder"))();
  return found;
}

// CANN's stream behind the current one of torch_npu, whose Python knows it
fake_cann::Stream current_stream() {
  static std::mutex mutex;
  static std::unordered_map<c10::Stream, fake_cann::Stream> known;
  const c10::impl::VirtualGuardImpl guard(kNpu);
  const auto stream = guard.getStream(guard.getDevice());
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (const auto found = known.find(stream); found != known.end()) return found->second;
  }
  const py::gil_scoped_acquire gil;
  const auto number = py::module_::import("torch").attr("npu").attr("current_stream")().attr("npu_stream").cast<uintptr_t>();
  const std::lock_guard<std::mutex> lock(mutex);
  return known[stream] = reinterpret_cast<fake_cann::Stream>(number);
}

// Whether the stream records; raises where it would never run a launch
bool records(fake_cann::Stream stream, const std::string& name) {
  if (cann().records(stream)) return true;
  const auto refusal = cann().refusal(stream);
  TORCH_CHECK(refusal.empty(), "[fake CANN] ", name, ": ", refusal);
  return false;
}

bool on_device(const at::Tensor& t) { return t.defined() && t.device().type() == kNpu; }

Touch touch_of(const at::Tensor& t, bool written, bool fresh = false) {
  size_t extent = t.numel() ? 1 : 0;
  for (int64_t d = 0; d < t.dim() && t.numel(); ++d) extent += (t.size(d) - 1) * t.stride(d);
  const auto at = reinterpret_cast<uintptr_t>(t.storage().data()) + t.storage_offset() * t.itemsize();
  return {at, extent * t.itemsize(), written, fresh};
}

// CPU tensors over addresses of the device; arguments that share a storage share it here
class Aliases {
 public:
  at::Tensor over(const at::Tensor& tensor) {
    if (!on_device(tensor)) return tensor;
    auto& storage = storages_[tensor.storage().unsafeGetStorageImpl()];
    if (!storage) {
      auto data = c10::DataPtr(const_cast<void*>(tensor.storage().data()), c10::Device(c10::kCPU));
      storage = c10::Storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(data), c10::GetCPUAllocator(), false);
    }
    constexpr c10::DispatchKeySet lazy({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
    const auto keys = c10::DispatchKeySet(c10::DispatchKey::CPU) | (tensor.key_set() & lazy);
    auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, tensor.dtype());
    auto* impl = made.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    return made;
  }
  bool has(const at::Tensor& tensor) const { return storages_.count(tensor.storage().unsafeGetStorageImpl()) > 0; }

 private:
  std::unordered_map<const c10::StorageImpl*, c10::Storage> storages_;
};

template <class F>
void each_tensor(const c10::IValue& value, const F& f) {
  if (value.isTensor()) f(value.toTensor());
  else if (value.isTensorList()) for (const auto& t : value.toTensorVector()) f(t);
  else if (value.isOptionalTensorList()) for (const auto& t : value.toOptionalTensorVector()) if (t) f(*t);
}
c10::IValue over(const c10::IValue& value, Aliases& aliases) {
  if (value.isTensor()) return aliases.over(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const auto& t : value.toTensorVector()) list.push_back(aliases.over(t));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& t : value.toOptionalTensorVector()) list.push_back(t ? std::make_optional(aliases.over(*t)) : std::nullopt);
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == kNpu) return c10::Device(c10::kCPU);
  return value;
}

bool is_written(const c10::Argument& argument) {
  const auto* alias = argument.alias_info();
  if (!alias || alias->isWrite()) return alias;
  for (const auto& contained : alias->containedTypes()) if (contained.isWrite()) return true;
  return false;
}

Touches touches_of(const c10::OperatorHandle& op, const c10::Stack& stack) {
  Touches found;
  const auto& arguments = op.schema().arguments();
  const auto first = stack.size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool written = is_written(arguments[i]);
    each_tensor(stack[first + i], [&](const at::Tensor& t) { if (on_device(t)) found.push_back(touch_of(t, written)); });
  }
  return found;
}
// Indexing with numbers has the shape of its indices, with a mask that of its values
bool has_dynamic_shape(const c10::OperatorHandle& op, const c10::Stack& stack) {
  if (!op.hasTag(at::Tag::dynamic_output_shape)) return false;
  if (op.schema().name() != "aten::index") return true;
  bool masked = false;
  each_tensor(stack.back(), [&](const at::Tensor& t) { masked |= t.scalar_type() == at::kBool || t.scalar_type() == at::kByte; });
  return masked;
}
void keep_written(const Touches& touches) {
  for (const auto& touch : touches) if (touch.written) cann().keep(touch);
}

struct OperatorLaunch : Launch {
  c10::OperatorHandle op;
  c10::Stack arguments;
  std::vector<at::Tensor> results;  // over what was taken for them; undefined: an argument
  explicit OperatorLaunch(const c10::OperatorHandle& o) : op(o) {}

  void run() override {
    const c10::InferenceMode inference;
    c10::Stack stack = arguments;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    size_t i = 0;
    for (auto r = stack.size() - op.schema().returns().size(); r < stack.size(); ++r)
      each_tensor(stack[r], [&](const at::Tensor& found) {
        auto target = results.at(i++);
        if (!target.defined()) return;
        TORCH_CHECK(target.sizes() == found.sizes(), name, " gave ", found.sizes(), ", captured ", target.sizes());
        target.copy_(found);
      });
  }
};
struct CopyLaunch : Launch {
  at::Tensor target, source;
  void run() override {
    const c10::InferenceMode inference;
    target.copy_(source);
  }
};
struct PythonLaunch : Launch {
  py::object call;
  ~PythonLaunch() override {
    const py::gil_scoped_acquire gil;
    call = py::object();
  }
  void run() override {
    const py::gil_scoped_acquire gil;
    call();
  }
};

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.is_same(source)) return self;
  const auto stream = current_stream();
  const bool recording = records(stream, "aten::copy_");
  TORCH_CHECK(!recording || on_device(self) || self.is_pinned(), "[fake CANN] a copy to the host within a capture");
  Touches touches;
  if (on_device(source)) touches.push_back(touch_of(source, false));
  if (on_device(self)) touches.push_back(touch_of(self, true));
  Aliases aliases;
  auto captured = std::make_unique<CopyLaunch>();
  if (recording) {
    keep_written(touches);
    captured->name = "aten::copy_";
    captured->touches = touches;
    captured->target = aliases.over(self);
    captured->source = aliases.over(source);
  }
  HostCall target_side, source_side;  // two, because a copy may cross devices
  auto target = target_side.to_host(self, true);
  target.copy_(source_side.to_host(source, false));
  if (recording) cann().record(std::move(captured));
  else cann().launched(stream, "aten::copy_", touches);
  if (!recording && !on_device(self) && !non_blocking) cann().finished(stream);
  return self;
}
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  auto writable = target;
  return copy_(writable, self, non_blocking);
}
at::Scalar item(const at::Tensor& self) {
  const auto stream = current_stream();
  TORCH_CHECK(!records(stream, "item()"), "[fake CANN] item() within a capture");
  cann().finished(stream);
  HostCall call;
  return call.to_host(self, false).item();
}

// Kernels that are wrapped here: operators of add_compute, which a capture would lose without a word, and collectives
constexpr const char* kComputed[] = {
    "_copy_from_and_resize", "convolution_overrideable", "_scaled_dot_product_fused_attention_overrideable", "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell"};
constexpr const char* kCollectives[] = {"allreduce_", "broadcast_", "_allgather_base_", "_reduce_scatter_base_", "alltoall_base_"};
using Kernel = decltype(std::declval<c10::OperatorHandle>().getComputedKernelForDispatchKey(c10::DispatchKey::CPU));
std::unordered_map<c10::OperatorName, Kernel>& wrapped() {
  static auto* kernels = new std::unordered_map<c10::OperatorName, Kernel>();
  return *kernels;
}
void call(const c10::OperatorHandle& op, c10::Stack* stack) {
  wrapped().at(op.operator_name()).callBoxed(op, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), stack);
}
void compute(const c10::OperatorHandle& op, c10::Stack* stack) {
  const auto stream = current_stream();
  TORCH_CHECK(!records(stream, op.schema().name()), "[fake CANN] a capture cannot record ", op.schema().name());
  const auto touches = touches_of(op, *stack);
  call(op, stack);
  cann().launched(stream, op.schema().name(), touches);
}

// A replay meets the other ranks again: gloo takes the CPU tensors as they are.
struct CollectiveLaunch : Launch {
  c10::OperatorHandle op;
  c10::Stack arguments;
  explicit CollectiveLaunch(const c10::OperatorHandle& o) : op(o) {}
  void run() override {
    c10::Stack stack = arguments;
    call(op, &stack);
    stack.back().toCustomClass<c10d::Work>()->wait();
  }
};
void communicate(const c10::OperatorHandle& op, c10::Stack* stack) {
  const auto stream = current_stream();
  const bool recording = records(stream, op.schema().name());
  auto touches = touches_of(op, *stack);
  for (auto& touch : touches) touch.written = true;  // their schemas do not say
  if (!recording) {
    call(op, stack);
    return cann().launched(stream, op.schema().name(), touches);
  }
  auto captured = std::make_unique<CollectiveLaunch>(op);
  captured->name = op.schema().name();
  captured->touches = touches;
  keep_written(touches);
  Aliases aliases;
  for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); ++i)
    captured->arguments.push_back(over((*stack)[i], aliases));
  call(op, stack);
  cann().record(std::move(captured));
}
template <void (*function)(const c10::OperatorHandle&, c10::Stack*)>
void wrap(torch::Library& library, const char* space, const char* name) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow((std::string(space) + "::" + name).c_str(), "");
  wrapped().emplace(op.operator_name(), op.getComputedKernelForDispatchKey(c10::DispatchKey::PrivateUse1));
  library.impl(name, torch::CppFunction::makeFromBoxedFunction<function>());
}

using PythonTouches = std::vector<std::tuple<uintptr_t, size_t, bool, bool>>;
Touches native(const PythonTouches& given) {
  Touches all;
  for (const auto& [at, bytes, written, fresh] : given) all.push_back({at, bytes, written, fresh});
  return all;
}

}  // namespace

void launch(const c10::OperatorHandle& op, c10::Stack* stack) {
  const auto& schema = op.schema();
  const auto stream = current_stream();
  auto touches = touches_of(op, *stack);
  if (!records(stream, schema.name())) {
    fallback(op, stack);
    return cann().launched(stream, schema.name(), touches);
  }
  TORCH_CHECK(!op.hasTag(at::Tag::nondeterministic_seeded), "[fake CANN] no captured random operator: ", schema.name());
  TORCH_CHECK(!has_dynamic_shape(op, *stack), "[fake CANN] ", schema.name(), " waits for the device within a capture");
  auto captured = std::make_unique<OperatorLaunch>(op);
  captured->name = schema.name();
  captured->touches = std::move(touches);
  keep_written(captured->touches);
  Aliases aliases;
  const auto first = stack->size() - schema.arguments().size();
  for (size_t i = first; i < stack->size(); ++i) captured->arguments.push_back(over((*stack)[i], aliases));
  fallback(op, stack);
  for (auto r = stack->size() - schema.returns().size(); r < stack->size(); ++r)
    each_tensor((*stack)[r], [&](const at::Tensor& t) {
      const bool fresh = on_device(t) && !aliases.has(t);
      captured->results.push_back(fresh ? Aliases().over(t) : at::Tensor());
      if (fresh) captured->touches.push_back(touch_of(t, true, true));
    });
  cann().record(std::move(captured));
}

void add_recorded(torch::Library& library) {
  library.impl("copy_", copy_);
  library.impl("_copy_from", copy_from);
  library.impl("_local_scalar_dense", item);
  for (const auto* name : kComputed) wrap<&compute>(library, "aten", name);
  static torch::Library c10d(torch::Library::IMPL, "c10d", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const auto* name : kCollectives) wrap<&communicate>(c10d, "c10d", name);
}

void add_launches(py::module_& module) {
  module.def("records", [](const std::string& name) { return records(current_stream(), name); });
  module.def("keep", [](const PythonTouches& touches) { keep_written(native(touches)); });
  module.def("launched", [](const std::string& name, const PythonTouches& touches) {
    cann().launched(current_stream(), name, native(touches));
  });
  module.def("record", [](const std::string& name, py::object call, const PythonTouches& touches) {
    auto captured = std::make_unique<PythonLaunch>();
    captured->name = name;
    captured->call = std::move(call);
    captured->touches = native(touches);
    cann().record(std::move(captured));
  });
  module.def("graphs", [] { return cann().graphs(); });
  module.def("reports", [] { return cann().reports(); });
  module.def("memory", [](uintptr_t at, size_t bytes) { return cann().memory(at, bytes); });
}

}  // namespace npusim

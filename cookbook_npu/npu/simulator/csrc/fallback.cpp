#include "fallback.h"
#include "faults.h"
#include "generator.h"
#include "memory.h"
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/List.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/flat_hash_map.h>
#include <torch/library.h>
#include <atomic>
#include <unordered_set>

namespace npusim {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

std::atomic<int64_t> calls{0};

// Lazy conjugation and negation are bits of the key set: an alias that lost them would read other numbers.
DispatchKeySet key_set(DispatchKey backend, const at::Tensor& like) {
  constexpr DispatchKeySet lazy({DispatchKey::Conjugate, DispatchKey::Negative});
  return DispatchKeySet(backend) | (like.key_set() & lazy);
}

void copy_geometry(const at::Tensor& target, const at::Tensor& source) {
  auto* impl = target.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  if (source.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
}

at::Tensor tensor_over(c10::Storage storage, DispatchKey backend, const at::Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), key_set(backend, like), like.dtype());
  copy_geometry(tensor, like);
  return tensor;
}

c10::DataPtr borrowed_data(const c10::Storage& storage) {
  return c10::DataPtr(const_cast<void*>(storage.data()), c10::Device(c10::kCPU));
}

void release_storage(void* context) { delete static_cast<c10::Storage*>(context); }
c10::DataPtr owning_data(const c10::Storage& storage) {
  return c10::DataPtr(const_cast<void*>(storage.data()), new c10::Storage(storage), &release_storage, c10::Device(c10::kCPU));
}

c10::Storage host_storage(c10::DataPtr data, size_t bytes) {
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(data), c10::GetCPUAllocator(), /*resizable=*/true);
}

// Aliases are made and dropped for every operator, so their two objects are kept for the next one. A tensor that is made in inference
// mode stays an inference tensor, hence two pools.
struct SpareAlias {
  at::Tensor tensor;
  c10::Storage storage;
};
thread_local c10::SmallVector<SpareAlias, 16> spare_aliases[2];
constexpr size_t kMaxSpare = 16;

c10::SmallVector<SpareAlias, 16>& spares() { return spare_aliases[c10::InferenceMode::is_enabled() ? 1 : 0]; }
bool is_plain(const at::Tensor& tensor) {
  return !tensor.is_conj() && !tensor.is_neg() && !tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

// What the fallback must know of an operator, worked out once.
struct Traits {
  c10::SmallVector<bool, 12> written;
  int generator = -1;  // position of the generator argument
  bool seeded = false, host_arguments_allowed = false;
};

// Operators whose tensor arguments may lie on the host while others lie on the device, as on a real accelerator.
bool allows_host_arguments(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index_put",
      "aten::_unsafe_masked_index", "aten::_unsafe_masked_index_put_accumulate", "aten::tensor_split", "aten::_pack_padded_sequence",
      "aten::repeat_interleave", "aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_sgd_", "aten::_fused_adagrad_",
      "aten::_foreach_copy_"};
  return names.count(name) > 0;
}

bool is_written(const c10::Argument& argument) {
  const auto* alias = argument.alias_info();
  if (!alias) return false;
  if (alias->isWrite()) return true;
  for (const auto& contained : alias->containedTypes()) if (contained.isWrite()) return true;
  return false;
}

Traits work_out(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  TORCH_CHECK_NOT_IMPLEMENTED(op.hasKernelForDispatchKey(DispatchKey::CPU) || op.hasComputedKernelForDispatchKey(DispatchKey::CPU),
                              "simulated NPU: operator ", schema.operator_name(),
                              " has no CPU kernel, so the simulated device cannot run it");
  Traits traits;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    traits.written.push_back(is_written(schema.arguments()[i]));
    if (schema.arguments()[i].name() == "generator") traits.generator = static_cast<int>(i);
  }
  traits.seeded = op.hasTag(at::Tag::nondeterministic_seeded);
  traits.host_arguments_allowed = allows_host_arguments(schema.name());
  return traits;
}

const Traits& traits_of(const c10::OperatorHandle& op) {
  thread_local ska::flat_hash_map<const c10::FunctionSchema*, std::unique_ptr<Traits>> known;
  auto& traits = known[&op.schema()];
  // A custom operator may be taken down and another one registered at its address.
  if (!traits || traits->written.size() != op.schema().arguments().size()) traits = std::make_unique<Traits>(work_out(op));
  return *traits;
}

// The operators of the device have no kernels for the wide unsigned types: such tensors can be made, viewed and copied, nothing else.
void refuse_wide_unsigned(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != kNpu) return;
  const auto type = tensor.scalar_type();
  if (C10_LIKELY(type != at::kUInt16 && type != at::kUInt32 && type != at::kUInt64)) return;
  TORCH_CHECK_NOT_IMPLEMENTED(false, "simulated NPU: no operator of the device knows ", type, ", as on a real NPU; view as the signed type");
}

c10::List<at::Tensor> list_to_host(const c10::List<at::Tensor>& list, bool written, HostCall& call) {
  c10::List<at::Tensor> result;
  result.reserve(list.size());
  for (size_t i = 0; i < list.size(); ++i) {
    refuse_wide_unsigned(list.get(i));
    result.push_back(call.to_host(list.get(i), written));
  }
  return result;
}

c10::List<std::optional<at::Tensor>> list_to_host(const c10::List<std::optional<at::Tensor>>& list, bool written, HostCall& call) {
  c10::List<std::optional<at::Tensor>> result;
  result.reserve(list.size());
  for (size_t i = 0; i < list.size(); ++i) {
    const std::optional<at::Tensor> element = list.get(i);
    result.push_back(element ? std::make_optional(call.to_host(*element, written)) : std::nullopt);
  }
  return result;
}

void argument_to_host(c10::IValue& value, bool written, HostCall& call) {
  if (value.isTensor()) {
    refuse_wide_unsigned(value.toTensor());
    value = call.to_host(std::move(value).toTensor(), written);
  } else if (value.isTensorList()) {
    value = list_to_host(value.toTensorList(), written, call);
  } else if (value.isOptionalTensorList()) {
    value = list_to_host(value.toOptionalTensorList(), written, call);
  } else if (value.isDevice() && value.toDevice().type() == kNpu) {
    call.use_device(value.toDevice());
    value = c10::Device(c10::kCPU);
  }
}

void result_to_device(c10::IValue& value, HostCall& call) {
  if (value.isTensor()) {
    value = call.to_device(std::move(value).toTensor());
  } else if (value.isTensorList()) {
    const auto list = value.toTensorList();
    c10::List<at::Tensor> result;
    result.reserve(list.size());
    for (size_t i = 0; i < list.size(); ++i) result.push_back(call.to_device(list.get(i)));
    value = std::move(result);
  }
}

void run_on_cpu(const c10::OperatorHandle& op, c10::Stack* stack) { op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack); }

// While it lives, the default CPU generator continues the device's random sequence.
class LentState {
 public:
  explicit LentState(at::Generator device_state)
      : device_(std::move(device_state)), cpu_(at::detail::getDefaultCPUGenerator()), saved_(cpu_.get_state()) {
    cpu_.set_state(device_.get_state());
  }
  ~LentState() {
    device_.set_state(cpu_.get_state());
    cpu_.set_state(saved_);
  }

 private:
  at::Generator device_, cpu_;
  at::Tensor saved_;
};

void run_random(const c10::OperatorHandle& op, c10::Stack* stack, c10::IValue* generator_slot, c10::Device device) {
  std::optional<at::Generator> given;
  if (generator_slot && generator_slot->isGenerator()) given = generator_slot->toGenerator();
  TORCH_CHECK(!given || given->device().type() == kNpu, "Expected an npu generator for an npu tensor, but found one of ", given->device());
  auto host = host_generator(given, device);
  if (generator_slot) {
    *generator_slot = host;
    return run_on_cpu(op, stack);
  }
  const LentState lent(host);
  run_on_cpu(op, stack);
}

}  // namespace

at::Tensor host_view(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != kNpu) return tensor;
  return tensor_over(host_storage(owning_data(tensor.storage()), tensor.storage().nbytes()), DispatchKey::CPU, tensor);
}

void let_go(const at::Tensor& view) {
  if (!view.defined()) return;
  auto* storage = view.storage().unsafeGetStorageImpl();
  if (storage->data_ptr().get_deleter() == &release_storage) storage->set_data_ptr_noswap(c10::DataPtr(nullptr, c10::Device(c10::kCPU)));
}

const HostCall::Alias* HostCall::sharing_storage(const c10::StorageImpl* device_storage) const {
  for (const auto& alias : aliases_) if (alias.device.storage().unsafeGetStorageImpl() == device_storage) return &alias;
  return nullptr;
}

at::Tensor HostCall::to_host(at::Tensor tensor, bool written) {
  if (!tensor.defined()) return tensor;
  if (tensor.device().type() != kNpu) {
    if (tensor.is_cpu() && tensor.dim() > 0) has_host_tensor_ = true;  // a 0-dim host tensor counts as a number, as on every accelerator
    return tensor;
  }
  faults::check_device(tensor.device().index());
  if (!has_device_) {
    device_ = tensor.device();
    has_device_ = true;
  } else if (tensor.device() != device_) {
    other_device_ = tensor.device();
    has_other_ = true;
  }
  for (auto& alias : aliases_) {
    if (!alias.device.is_same(tensor)) continue;
    alias.written |= written;
    return alias.host;
  }
  const auto& device_storage = tensor.storage();
  const auto* earlier = sharing_storage(device_storage.unsafeGetStorageImpl());
  auto& pool = spares();
  if (!pool.empty() && is_plain(tensor)) {
    SpareAlias spare = std::move(pool.back());
    pool.pop_back();
    if (!earlier) {
      spare.storage.unsafeGetStorageImpl()->set_data_ptr_noswap(borrowed_data(device_storage));
      spare.storage.set_nbytes(device_storage.nbytes());
    }
    auto* impl = spare.tensor.unsafeGetTensorImpl();
    impl->set_storage_and_dtype(earlier ? earlier->host.storage() : spare.storage, tensor.dtype());
    copy_geometry(spare.tensor, tensor);
    aliases_.push_back({std::move(tensor), std::move(spare.tensor), std::move(spare.storage), nullptr, written, earlier != nullptr});
  } else {
    auto storage = earlier ? earlier->host.storage() : host_storage(borrowed_data(device_storage), device_storage.nbytes());
    auto host = tensor_over(storage, DispatchKey::CPU, tensor);
    aliases_.push_back({std::move(tensor), std::move(host), std::move(storage), nullptr, written, earlier != nullptr});
  }
  auto& alias = aliases_.back();
  alias.data = alias.host.storage().data();
  return alias.host;
}

at::Tensor HostCall::to_device(at::Tensor tensor) {
  if (!tensor.defined() || !tensor.is_cpu()) return tensor;
  for (const auto& alias : aliases_) if (alias.host.is_same(tensor)) return alias.device;
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == c10::kStrided && !tensor.is_quantized(),
                              "simulated NPU: only dense strided tensors exist on it; this operator returned layout ", tensor.layout());
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  for (const auto& alias : aliases_) {  // a view of an argument becomes a view on the device
    if (alias.host.storage().unsafeGetStorageImpl() != storage) continue;
    return tensor_over(alias.device.storage(), DispatchKey::PrivateUse1, tensor);
  }
  return tensor_over(adopt_storage(tensor.storage(), device_), DispatchKey::PrivateUse1, tensor);
}

void HostCall::check_devices(const c10::FunctionSchema& schema) const {
  faults::check_device(device_.index());
  if (C10_LIKELY(!has_other_ && (!has_host_tensor_ || !has_device_ || host_arguments_allowed_))) return;
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", device_, " and ",
              has_other_ ? other_device_ : c10::Device(c10::kCPU), "! (when checking arguments for ", schema.operator_name(), ")");
}

void HostCall::resize_written() {
  for (auto& alias : aliases_) {
    if (!alias.written) continue;
    const auto& host = alias.host;
    auto* host_impl = host.storage().unsafeGetStorageImpl();
    if (host_impl->data() != alias.data) {  // the kernel gave the argument new memory
      auto* device_impl = alias.device.storage().unsafeGetStorageImpl();
      const auto bytes = host_impl->nbytes();
      device_impl->set_data_ptr_noswap(adopt_data(host_impl->set_data_ptr(c10::DataPtr()), bytes, device_));
      device_impl->set_nbytes(bytes);
    }
    if (host.sizes() == alias.device.sizes() && host.strides() == alias.device.strides()) continue;
    alias.device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  }
}

void HostCall::recycle(Alias& alias) {
  auto* impl = alias.host.unsafeGetTensorImpl();
  const bool kept = alias.host.use_count() > 1;
  if (alias.borrowed) {
    if (kept) return;
    if (alias.storage.unsafeGetStorageImpl() == alias.host.storage().unsafeGetStorageImpl()) return;  // has no storage of its own
    impl->set_storage_keep_dtype(alias.storage);
  }
  auto* storage = alias.storage.unsafeGetStorageImpl();
  if (kept || alias.storage.use_count() > 2) {  // someone keeps the alias: it must keep the device memory alive, too
    if (storage->data() == alias.data) storage->set_data_ptr_noswap(owning_data(alias.device.storage()));
    return;
  }
  auto& pool = spares();
  if (pool.size() >= kMaxSpare || !is_plain(alias.host)) return;
  storage->set_data_ptr_noswap(c10::DataPtr());
  storage->set_nbytes(0);
  pool.push_back({std::move(alias.host), std::move(alias.storage)});
}

HostCall::~HostCall() {
  while (!aliases_.empty()) {  // backwards: a borrower returns before its lender
    recycle(aliases_.back());
    aliases_.pop_back();
  }
}

void fallback(const c10::OperatorHandle& op, c10::Stack* stack) {
  calls.fetch_add(1, std::memory_order_relaxed);
  const auto& traits = traits_of(op);
  const auto first = stack->size() - traits.written.size();
  HostCall call(traits.host_arguments_allowed);
  for (size_t i = 0; i < traits.written.size(); ++i) argument_to_host((*stack)[first + i], traits.written[i], call);
  call.check_devices(op.schema());
  if (traits.seeded || traits.generator >= 0) {
    run_random(op, stack, traits.generator >= 0 ? &(*stack)[first + traits.generator] : nullptr, call.device());
  } else {
    run_on_cpu(op, stack);
  }
  call.resize_written();
  const auto results = op.schema().returns().size();
  for (auto i = stack->size() - results; i < stack->size(); ++i) result_to_device((*stack)[i], call);
}

int64_t fallback_count() { return calls.load(std::memory_order_relaxed); }

}  // namespace npusim

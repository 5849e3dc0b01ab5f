// The zero-copy fallback: any operator of the simulated NPU runs as the CPU kernel on tensors that alias the device's memory.
#pragma once
#include "device.h"
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>

namespace npusim {

// A CPU tensor over the same bytes that keeps the device storage alive: for users that outlive the call (collectives).
at::Tensor host_view(const at::Tensor& tensor);

// Gives the device storage back that a host view keeps alive; nobody may read the view afterwards.
void let_go(const at::Tensor& view);

// The host side of one operator call: makes the aliases, and turns what the kernel returned back into device tensors.
class HostCall {
 public:
  explicit HostCall(bool host_arguments_allowed = false) : host_arguments_allowed_(host_arguments_allowed) {}
  ~HostCall();
  HostCall(const HostCall&) = delete;

  at::Tensor to_host(at::Tensor tensor, bool written);
  at::Tensor to_host(const std::optional<at::Tensor>& tensor) { return tensor ? to_host(*tensor, false) : at::Tensor(); }
  at::Tensor to_device(at::Tensor tensor);
  void use_device(c10::Device device) { if (!has_device_) device_ = device; }  // of a factory function, which has no tensor argument
  c10::Device device() const { return device_; }
  void check_devices(const c10::FunctionSchema& schema) const;  // refuses npu with cpu, and one npu with another
  void resize_written();  // carries out= arguments that the kernel resized back to the device tensors

 private:
  struct Alias {
    at::Tensor device, host;
    c10::Storage storage;  // the host tensor's own, even while it borrows that of an earlier argument
    const void* data;
    bool written, borrowed;
  };
  const Alias* sharing_storage(const c10::StorageImpl* device_storage) const;
  static void recycle(Alias& alias);

  c10::SmallVector<Alias, 6> aliases_;
  c10::Device device_{kNpu, -1}, other_device_{kNpu, -1};
  bool has_device_ = false, has_other_ = false, has_host_tensor_ = false;
  bool host_arguments_allowed_;
};

// Of an operator without overload names, for HostCall::check_devices.
inline const c10::FunctionSchema& schema_of(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").schema(); }

void fallback(const c10::OperatorHandle& op, c10::Stack* stack);

}  // namespace npusim

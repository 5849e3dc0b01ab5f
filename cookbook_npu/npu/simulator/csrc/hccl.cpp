// The "hccl" backend of torch.distributed: collectives of npu tensors, carried out by gloo on host views of the same memory.
#include "hccl.h"
#include "fallback.h"
#include "faults.h"
#include "memory.h"
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>

namespace npusim {
namespace {

using namespace c10d;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<Work>;
using Milliseconds = std::chrono::milliseconds;

bool gloo_moves(at::ScalarType type) {
  switch (type) {
    case at::kFloat: case at::kDouble: case at::kHalf: case at::kBFloat16: case at::kChar:
    case at::kByte: case at::kBool: case at::kInt: case at::kLong: return true;
    default: return false;
  }
}

// What only moves bytes works for every type: gloo gets those it does not know (complex, int16, float8) as bytes.
at::Tensor wire(const at::Tensor& tensor) {
  auto host = host_view(tensor);
  if (!host.defined() || gloo_moves(host.scalar_type())) return host;
  TORCH_CHECK(host.is_contiguous(), "hccl: a ", host.scalar_type(), " tensor must be contiguous to be sent");
  return host.view(at::kByte);
}
Tensors wire(const Tensors& tensors) {
  Tensors result;
  for (const auto& tensor : tensors) result.push_back(wire(tensor));
  return result;
}
TensorLists wire(const TensorLists& lists) {
  TensorLists result;
  for (const auto& list : lists) result.push_back(wire(list));
  return result;
}
Tensors host_views(const Tensors& tensors) {
  Tensors result;
  for (const auto& tensor : tensors) result.push_back(host_view(tensor));
  return result;
}
Tensors contiguous(const Tensors& tensors) {
  Tensors result;
  for (const auto& tensor : tensors) result.push_back(tensor.contiguous());
  return result;
}
Tensors flatten(const TensorLists& lists) {
  Tensors result;
  for (const auto& list : lists) result.insert(result.end(), list.begin(), list.end());
  return result;
}

// One collective under way: gloo's work, the host tensors it needs, what is left to do when it is over, and the npu tensors it fills.
class HostWork final : public Work {
 public:
  HostWork(OpType type, std::vector<WorkPtr> inner, Tensors outputs, Tensors kept, std::function<void()> finish_up)
      : Work(-1, type), inner_(std::move(inner)), outputs_(std::move(outputs)), kept_(std::move(kept)), finish_up_(std::move(finish_up)) {}

  bool wait(Milliseconds timeout = kNoTimeout) override {
    for (auto& work : inner_) work->wait(timeout);
    finish_once();
    return true;
  }
  void synchronize() override { wait(); }
  void blockCurrentStream() override { wait(); }
  bool isCompleted() override {
    for (auto& work : inner_) if (!work->isCompleted()) return false;
    if (exception()) return true;
    finish_once();
    return true;
  }
  bool isSuccess() const override {
    for (const auto& work : inner_) if (!work->isSuccess()) return false;
    return true;
  }
  std::exception_ptr exception() const override {
    for (const auto& work : inner_) if (auto error = work->exception()) return error;
    return nullptr;
  }
  int sourceRank() const override { return inner_.empty() ? -1 : inner_.front()->sourceRank(); }
  Tensors result() override {
    wait();
    return outputs_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait();
    std::lock_guard<std::mutex> guard(mutex_of_finish_);
    if (!future_) {
      future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
      future_->markCompleted(at::IValue(outputs_));
    }
    return future_;
  }

 private:
  void finish_once() {
    std::lock_guard<std::mutex> guard(mutex_of_finish_);
    if (finished_) return;
    finished_ = true;
    if (finish_up_) finish_up_();
    finish_up_ = nullptr;
    // gloo's thread may hold the views for a moment longer: device memory must not depend on when it lets them go.
    for (const auto& view : kept_) let_go(view);
    kept_.clear();
  }
  std::vector<WorkPtr> inner_;
  Tensors outputs_, kept_;
  std::function<void()> finish_up_;
  std::mutex mutex_of_finish_;
  bool finished_ = false;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// An injected hang: this rank never joins the collective. Waiting for it ends as on a real device, with the timeout of the group.
class HungWork final : public Work {
 public:
  HungWork(std::string operation, Milliseconds timeout) : operation_(std::move(operation)), timeout_(timeout) {}
  bool isCompleted() override { return false; }
  bool isSuccess() const override { return false; }
  bool wait(Milliseconds timeout = kNoTimeout) override {
    const auto limit = timeout == kNoTimeout ? timeout_ : timeout;
    std::unique_lock<std::mutex> lock(mutex_);
    cv_.wait_for(lock, limit, [] { return false; });
    TORCH_CHECK_WITH(DistBackendError, false, "hccl: ", operation_, " did not finish within ", limit.count(),
                     " ms (simulated NPU, injected fault)");
    return false;
  }
  void synchronize() override { wait(); }
  void blockCurrentStream() override { wait(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait();
    return nullptr;
  }

 private:
  std::string operation_;
  Milliseconds timeout_;
};

// The device buffers of a communicator, held as long as it lives.
class Buffers {
 public:
  explicit Buffers(uint64_t bytes) : bytes_(bytes) {}
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;
  ~Buffers() { release(); }
  bool held() const { return device_ >= 0; }
  void take(int device) {
    if (held()) return;
    take_outside(device, bytes_);
    device_ = device;
  }
  void release() {
    if (held()) give_back_outside(device_, bytes_);
    device_ = -1;
  }

 private:
  uint64_t bytes_;
  int device_ = -1;
};

// Makes the gloo group that carries a communicator: a Python function of the number of communicators that came before.
class Join {
 public:
  explicit Join(pybind11::object function) : function_(std::move(function)) {}
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;
  ~Join() {
    if (!Py_IsInitialized()) {  // the interpreter is gone, and the function with it
      function_.release();
      return;
    }
    pybind11::gil_scoped_acquire gil;
    function_ = pybind11::object();
  }
  c10::intrusive_ptr<Backend> operator()(int generation) const {
    pybind11::gil_scoped_acquire gil;
    return function_(generation).cast<c10::intrusive_ptr<Backend>>();
  }

 private:
  pybind11::object function_;
};

class ProcessGroupHCCL final : public Backend {
 public:
  ProcessGroupHCCL(pybind11::object join, int rank, int size, Milliseconds timeout, uint64_t buffer_bytes)
      : Backend(rank, size), join_(std::move(join)), timeout_(timeout), options_(c10::make_intrusive<Options>("hccl", timeout)),
        buffers_(buffer_bytes), gloo_(join_(0)) {}

  // As the real one does: the communicator goes, with its buffers, and the next collective of all ranks makes another.
  void abort_communicator() {
    if (!buffers_.held()) return;  // none was made yet
    buffers_.release();
    gloo_ = nullptr;
    generation_++;
  }
  bool has_communicator() const { return buffers_.held(); }

  const std::string getBackendName() const override { return "hccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  ErrorType getError() override { return ErrorType::SUCCESS; }
  void setTimeout(Milliseconds timeout) override {
    timeout_ = timeout;
    if (gloo_) gloo_->setTimeout(timeout);
  }
  void abort() override {
    if (gloo_) gloo_->abort();
    buffers_.release();
  }
  void shutdown() override {
    if (gloo_) gloo_->shutdown();
  }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_ ? gloo_->getSequenceNumberForGroup() : 0; }

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {
    coalescing_ = true;
    pending_.clear();
  }
  WorkPtr endCoalescing() override {
    coalescing_ = false;
    return all_of(std::move(pending_), {});
  }

  WorkPtr broadcast(Tensors& tensors, const BroadcastOptions& options) override {
    return issue("broadcast", [&] {
      auto hosts = wire(tensors);
      return under_way(OpType::BROADCAST, alone() ? nullptr : gloo_->broadcast(hosts, options), tensors, hosts);
    });
  }

  WorkPtr allreduce(Tensors& tensors, const AllreduceOptions& options) override {
    return issue("all_reduce", [&] {
      auto plain = options;
      auto hosts = host_views(tensors);
      auto finish_up = average(plain, hosts);
      return under_way(OpType::ALLREDUCE, sum_over_ranks(hosts, plain), tensors, hosts, finish_up);
    });
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const AllreduceCoalescedOptions& options) override {
    std::vector<WorkPtr> works;
    for (auto& tensor : tensors) {
      Tensors one{tensor};
      works.push_back(allreduce(one, options));
    }
    return all_of(std::move(works), tensors);
  }

  WorkPtr reduce(Tensors& tensors, const ReduceOptions& options) override {
    return issue("reduce", [&] {
      auto plain = options;
      auto hosts = host_views(tensors);
      auto finish_up = average(plain, hosts);
      return under_way(OpType::REDUCE, gloo_->reduce(hosts, plain), tensors, hosts, finish_up);
    });
  }

  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const AllgatherOptions& options) override {
    return issue("all_gather", [&] {
      auto hosts = wire(outputs);
      auto sources = contiguous(wire(inputs));
      auto work = gloo_->allgather(hosts, sources, options);
      return under_way(OpType::ALLGATHER, work, outputs.at(0), joined(flatten(hosts), sources));
    });
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const AllgatherOptions& options) override {
    return issue("all_gather", [&] {
      auto host = wire(output);
      auto source = wire(input).contiguous();
      if (alone()) {
        auto copy = [host, source] { host.view(-1).copy_(source.view(-1)); };
        return under_way(OpType::_ALLGATHER_BASE, nullptr, {output}, {host, source}, copy);
      }
      auto work = gloo_->_allgather_base(host, source, options);
      return under_way(OpType::_ALLGATHER_BASE, work, {output}, {host, source});
    });
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const AllgatherOptions& options) override {
    std::vector<WorkPtr> works;
    for (size_t i = 0; i < outputs.size(); ++i) works.push_back(_allgather_base(outputs[i], inputs[i], options));
    return all_of(std::move(works), outputs);
  }

  // gloo sums whole buffers; this rank then keeps its part.
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const ReduceScatterOptions& options) override {
    return issue("reduce_scatter", [&] {
      TORCH_CHECK(input.numel() == output.numel() * getSize(), "hccl: reduce_scatter of ", input.numel(), " elements into ",
                  output.numel(), " on ", getSize(), " ranks: the input must be ", getSize(), " times the output");
      AllreduceOptions plain;
      plain.reduceOp = options.reduceOp;
      plain.timeout = options.timeout;
      auto host = host_view(output);
      Tensors sum{host_view(input).clone(at::MemoryFormat::Contiguous)};
      auto divide = average(plain, sum);
      auto work = sum_over_ranks(sum, plain);
      auto keep_part = [sum, host, divide, rank = getRank()] {
        if (divide) divide();
        host.copy_(sum[0].reshape({-1}).narrow(0, rank * host.numel(), host.numel()).view(host.sizes()));
      };
      return under_way(OpType::_REDUCE_SCATTER_BASE, work, {output}, sum, keep_part);
    });
  }

  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const ReduceScatterOptions& options) override {
    Tensors parts;
    for (const auto& part : inputs.at(0)) parts.push_back(host_view(part).reshape({-1}));
    auto joined_input = at::cat(parts);
    return _reduce_scatter_base(outputs.at(0), joined_input, options);
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const ReduceScatterOptions& options) override {
    std::vector<WorkPtr> works;
    for (size_t i = 0; i < outputs.size(); ++i) works.push_back(_reduce_scatter_base(outputs[i], inputs[i], options));
    return all_of(std::move(works), outputs);
  }

  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const GatherOptions& options) override {
    return issue("gather", [&] {
      auto hosts = wire(outputs);
      auto sources = contiguous(wire(inputs));
      auto work = gloo_->gather(hosts, sources, options);
      return under_way(OpType::GATHER, work, outputs.empty() ? Tensors{} : outputs[0], joined(flatten(hosts), sources));
    });
  }

  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const ScatterOptions& options) override {
    return issue("scatter", [&] {
      auto hosts = wire(outputs);
      auto sources = wire(inputs);
      auto work = gloo_->scatter(hosts, sources, options);
      return under_way(OpType::SCATTER, work, outputs, joined(flatten(sources), hosts));
    });
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
                        const AllToAllOptions& options) override {
    return issue("all_to_all", [&] {
      auto host = wire(output);
      auto source = wire(input).contiguous();
      auto work = gloo_->alltoall_base(host, source, output_sizes, input_sizes, options);
      return under_way(OpType::ALLTOALL_BASE, work, {output}, {host, source});
    });
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const AllToAllOptions& options) override {
    return issue("all_to_all", [&] {
      Tensors parts;
      std::vector<int64_t> input_sizes, output_sizes;
      auto hosts = wire(outputs);
      for (const auto& part : wire(inputs)) {
        parts.push_back(part.reshape({-1}));
        input_sizes.push_back(part.numel());
      }
      int64_t total = 0;
      for (const auto& host : hosts) {
        output_sizes.push_back(host.numel());
        total += host.numel();
      }
      auto source = at::cat(parts);
      auto received = at::empty({total}, source.options());
      auto hand_out = [hosts, received, output_sizes] {  // made first: gloo consumes the sizes
        const auto pieces = received.split_with_sizes(output_sizes);
        for (size_t i = 0; i < hosts.size(); ++i) hosts[i].copy_(pieces[i].view(hosts[i].sizes()));
      };
      auto work = gloo_->alltoall_base(received, source, output_sizes, input_sizes, options);
      return under_way(OpType::ALLTOALL, work, outputs, {source, received}, hand_out);
    });
  }

  WorkPtr send(Tensors& tensors, int target, int tag) override {
    return issue("send", [&] {
      auto hosts = wire(tensors);
      return under_way(OpType::SEND, gloo_->send(hosts, target, tag), tensors, hosts);
    });
  }
  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    return issue("recv", [&] {
      auto hosts = wire(tensors);
      return under_way(OpType::RECV, gloo_->recv(hosts, source, tag), tensors, hosts);
    });
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return issue("recv", [&] {
      auto hosts = wire(tensors);
      return under_way(OpType::RECVANYSOURCE, gloo_->recvAnysource(hosts, tag), tensors, hosts);
    });
  }

  WorkPtr barrier(const BarrierOptions& options) override {
    return issue("barrier", [&] {
      BarrierOptions plain;  // gloo refuses the device ids that belong to an accelerator
      plain.timeout = options.timeout;
      return under_way(OpType::BARRIER, alone() ? nullptr : gloo_->barrier(plain), {}, {});
    });
  }

 private:
  template <typename Start>
  WorkPtr issue(const char* operation, Start start) {
    faults::check_device(current_device());
    connect();
    switch (faults::on_collective(operation)) {
      case faults::CollectiveFault::fail:
        TORCH_CHECK_WITH(DistBackendError, false, "hccl: ", operation, " failed on rank ", getRank(), " (simulated NPU, injected fault)");
      case faults::CollectiveFault::hang: return remember(c10::make_intrusive<HungWork>(operation, timeout_));
      case faults::CollectiveFault::none: return remember(start());
    }
    return nullptr;
  }
  // A group of one rank has nobody to wait for: half a millisecond of gloo's threads at each call.
  bool alone() const { return getSize() == 1; }
  WorkPtr sum_over_ranks(Tensors& hosts, const AllreduceOptions& options) {
    const bool changes_nothing = alone() && options.reduceOp != ReduceOp::PREMUL_SUM;
    return changes_nothing ? nullptr : gloo_->allreduce(hosts, options);
  }
  // A communicator is made by the first operation, not by the group.
  void connect() {
    if (!gloo_) {
      gloo_ = join_(generation_);
      gloo_->setTimeout(timeout_);
    }
    buffers_.take(current_device());
  }
  WorkPtr remember(WorkPtr work) {
    if (coalescing_) pending_.push_back(work);
    return work;
  }
  static WorkPtr under_way(OpType type, WorkPtr inner, Tensors outputs, Tensors kept, std::function<void()> finish_up = nullptr) {
    std::vector<WorkPtr> works;
    if (inner) works.push_back(std::move(inner));
    return c10::make_intrusive<HostWork>(type, std::move(works), std::move(outputs), std::move(kept), std::move(finish_up));
  }
  static WorkPtr all_of(std::vector<WorkPtr> works, Tensors outputs) {
    return c10::make_intrusive<HostWork>(OpType::COALESCED, std::move(works), std::move(outputs), Tensors{}, nullptr);
  }
  static Tensors joined(Tensors first, const Tensors& second) {
    first.insert(first.end(), second.begin(), second.end());
    return first;
  }
  // gloo cannot average: sum, then divide when the sum is there.
  template <typename ReducingOptions>
  std::function<void()> average(ReducingOptions& options, const Tensors& hosts) {
    if (options.reduceOp != ReduceOp::AVG) return nullptr;
    options.reduceOp = ReduceOp::SUM;
    return [hosts, size = getSize()] {
      for (auto host : hosts) host.is_floating_point() || host.is_complex() ? host.div_(size) : host.floor_divide_(size);
    };
  }

  Join join_;
  Milliseconds timeout_;
  c10::intrusive_ptr<Options> options_;
  Buffers buffers_;
  c10::intrusive_ptr<Backend> gloo_;
  int generation_ = 0;
  bool coalescing_ = false;
  std::vector<WorkPtr> pending_;
};

}  // namespace

void add_process_group(PyObject* module) {
  pybind11::module_::import("torch.distributed");  // defines the base class
  pybind11::class_<ProcessGroupHCCL, c10::intrusive_ptr<ProcessGroupHCCL>, c10d::Backend>(pybind11::handle(module), "ProcessGroupHCCL")
      .def(pybind11::init([](pybind11::object join, int rank, int size, double seconds, uint64_t buffer_bytes) {
             return c10::make_intrusive<ProcessGroupHCCL>(std::move(join), rank, size, Milliseconds(static_cast<int64_t>(seconds * 1000)),
                                                          buffer_bytes);
           }),
           pybind11::arg("join"), pybind11::arg("rank"), pybind11::arg("size"), pybind11::arg("seconds"), pybind11::arg("buffer_bytes"))
      .def("abort_hccl_comm", [](ProcessGroupHCCL& self, const std::string&) { self.abort_communicator(); }, pybind11::arg("reason"))
      .def("_delete_tcpstore_key", [](ProcessGroupHCCL&) {})  // every communicator meets under keys of its own here: none can be stale
      .def("has_communicator", &ProcessGroupHCCL::has_communicator);
}

}  // namespace npusim

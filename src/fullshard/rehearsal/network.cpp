// A simulated network as a backend of torch.distributed: this process is one rank of many, and the others have its data.
//
// A collective takes `latency + bytes / bandwidth`. Its results are those that it would have if all ranks had this
// rank's tensors: an all-gather copies them for each rank, a sum is a multiple, a mean stays. One link carries all
// collectives of a process group, one after the other. On a device a collective is a kernel that sleeps and one that
// copies: on the current stream if it is synchronous, and else on a stream of the group, as NCCL's. On the CPU its work
// is done at a point in time.
#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <thread>
#ifdef WITH_CUDA
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#endif

namespace {
using namespace c10d;
using at::Tensor;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<Work>;
using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

// Of this process: the network, how long the host waited for it, and of each kind of collective the number, the bytes
// that this rank sends or receives, and the seconds that they take.
double latency = 0, bandwidth = 1e9, waited = 0;
std::map<std::string, std::tuple<int64_t, int64_t, double>> totals;

#ifdef WITH_CUDA
using Event = c10::cuda::CUDAEvent;
double clock_rate = 0, copy_rate = 0; // of the device: cycles and copied bytes in a second

template <typename Launch>
double seconds_of(Launch launch) {
  Event begin(cudaEventDefault), end(cudaEventDefault);
  begin.record();
  launch();
  end.record();
  end.synchronize();
  return begin.elapsed_time(end) / 1e3;
}

void calibrate(at::Device device) {
  {
    auto from = at::zeros({1 << 27}, at::TensorOptions().device(device).dtype(at::kByte)), to = from.clone();
    for (int round = 0; round < 3; ++round) { // the first one is slower
      clock_rate = 2e7 / seconds_of([] { at::cuda::sleep(20'000'000); });
      copy_rate = from.nbytes() / seconds_of([&] { to.copy_(from); });
    }
  }
  c10::cuda::CUDACachingAllocator::emptyCache();
}
#endif

class SimulatedWork : public Work {
 public:
  Clock::time_point deadline = Clock::now();
#ifdef WITH_CUDA
  std::shared_ptr<Event> end;
  std::optional<c10::cuda::CUDAStream> stream;
  Tensors used; // until somebody waits; otherwise their memory serves others when the stream is done with it

  ~SimulatedWork() override {
    for (auto& each : used)
      c10::cuda::CUDACachingAllocator::recordStream(each.storage().data_ptr(), *stream);
  }
#endif

  bool isCompleted() override {
#ifdef WITH_CUDA
    if (end)
      return end->query();
#endif
    return Clock::now() >= deadline;
  }

  bool isSuccess() const override { return true; }
  void synchronize() override { wait(); }

  bool wait(std::chrono::milliseconds = kNoTimeout) override {
#ifdef WITH_CUDA
    if (end) {
      end->block(c10::cuda::getCurrentCUDAStream());
      used.clear();
      return true;
    }
#endif
    auto begin = Clock::now();
    std::this_thread::sleep_until(deadline - std::chrono::microseconds(100));
    while (Clock::now() < deadline)
      std::this_thread::yield(); // a thread that sleeps wakes up late
    waited += Seconds(Clock::now() - begin).count();
    return true;
  }
};

int64_t size_of(const Tensors& tensors) {
  int64_t bytes = 0;
  for (auto& each : tensors)
    bytes += each.nbytes();
  return bytes;
}

Tensors flat(const std::vector<Tensors>& lists) {
  Tensors every;
  for (auto& list : lists)
    every.insert(every.end(), list.begin(), list.end());
  return every;
}

class Network : public Backend {
 public:
  Network(int rank, int size) : Backend(rank, size) {}
  const std::string getBackendName() const override { return "rehearsal"; }
  WorkPtr broadcast(Tensors& tensors, const BroadcastOptions& options) override {
    return run("broadcast", size_of(tensors), 1, 0, options.asyncOp, tensors, [] {});
  }
  WorkPtr allreduce(Tensors& tensors, const AllreduceOptions& options) override {
    auto bytes = 2 * size_of(tensors);
    return run("all-reduce", bytes * share(), 2, bytes, options.asyncOp, tensors, [&] { reduce_all(tensors, tensors, options.reduceOp); });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }
  WorkPtr reduce(Tensors& tensors, const ReduceOptions& options) override {
    auto root = rank_ == options.rootRank ? tensors : Tensors();
    return run("reduce", size_of(tensors), 1, 0, options.asyncOp, tensors, [&] { reduce_all(root, root, options.reduceOp); });
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const AllgatherOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return allgather_into_tensor_coalesced(outputs, inputs, options);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const AllgatherOptions& options) override {
    auto bytes = size_of(outputs);
    return run("all-gather", bytes * share(), 1, bytes, options.asyncOp, flat({outputs, inputs}), [&] {
      for (size_t i = 0; i < outputs.size(); ++i) {
        auto every = outputs[i].view({size_, -1}), own = inputs[i].reshape({1, -1});
        bool is_there = outputs[i].is_alias_of(inputs[i]); // in place
        auto before = every.narrow(0, 0, is_there ? rank_ : size_), after = every.narrow(0, rank_ + 1, size_ - rank_ - 1);
        before.copy_(own.expand_as(before));
        if (is_there)
          after.copy_(own.expand_as(after));
      }
    });
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const AllgatherOptions& options) override {
    auto every = flat(outputs);
    return run("all-gather", size_of(every) * share(), 1, size_of(every), options.asyncOp, flat({every, inputs}), [&] {
      for (size_t i = 0; i < inputs.size(); ++i)
        copy_all(outputs[i], inputs[i]);
    });
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const GatherOptions& options) override {
    auto every = flat(outputs);
    return run("gather", (size_ - 1) * size_of(inputs), 1, 0, options.asyncOp, flat({inputs, every}),
               [&] { copy_all(every, inputs[0]); });
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const ScatterOptions& options) override {
    auto every = flat(inputs);
    return run("scatter", (size_ - 1) * size_of(outputs), 1, 0, options.asyncOp, flat({outputs, every}),
               [&] { copy_all(outputs, every.empty() ? outputs[0] : every[rank_]); });
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const ReduceScatterOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const ReduceScatterOptions& options) override {
    std::vector<Tensors> chunks;
    for (auto& each : inputs)
      chunks.push_back(each.view({size_, -1}).unbind());
    return reduce_scatter(outputs, chunks, options);
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const ReduceScatterOptions& options) override {
    auto every = flat(inputs);
    auto bytes = size_of(every);
    Tensors own;
    for (auto& each : inputs)
      own.push_back(each[rank_]);
    return run("reduce-scatter", bytes * share(), 1, 2 * bytes / size_, options.asyncOp, flat({outputs, every}),
               [&] { reduce_all(outputs, own, options.reduceOp); });
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const AllToAllOptions& options) override {
    std::vector<int64_t> out(size_, output.size(0) / size_), in(size_, input.size(0) / size_);
    auto outputs = output.split_with_sizes(output_sizes.empty() ? out : output_sizes);
    auto inputs = input.split_with_sizes(input_sizes.empty() ? in : input_sizes);
    return alltoall(outputs, inputs, options);
  }
  // Each rank sends what this one would send to itself.
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const AllToAllOptions& options) override {
    auto bytes = std::max(size_of(outputs), size_of(inputs));
    return run("all-to-all", bytes * share(), 1, bytes, options.asyncOp, flat({outputs, inputs}), [&] {
      auto own = inputs[rank_].reshape({-1});
      for (auto& each : outputs) {
        auto numel = std::min(each.numel(), own.numel());
        each.view({-1}).narrow(0, 0, numel).copy_(own.narrow(0, 0, numel));
        each.view({-1}).narrow(0, numel, each.numel() - numel).zero_();
      }
    });
  }
  // What this rank sends with a tag is what it receives with it.
  WorkPtr send(Tensors& tensors, int, int tag) override {
    return run("send", size_of(tensors), 1, 0, true, tensors, [&] { sent_[tag] = tensors[0].clone(); });
  }
  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    auto sent = sent_[tag];
    TORCH_CHECK(sent.defined() && sent.nbytes() == tensors[0].nbytes(), "a message of ", tensors[0].nbytes(),
                " bytes from rank ", source, " (tag ", tag, ") cannot be simulated: rank ", rank_, " is alone, and has ",
                "not sent such a message itself. Programs whose ranks do different things cannot be rehearsed");
    return run("receive", size_of(tensors), 1, 0, true, tensors, [&] { tensors[0].copy_(sent.view_as(tensors[0])); });
  }
  WorkPtr barrier(const BarrierOptions&) override {
#ifdef WITH_CUDA
    if (clock_rate > 0)
      c10::cuda::getCurrentCUDAStream().synchronize();
#endif
    return run("barrier", 0, 2, 0, true, {}, [] {});
  }

 private:
  std::map<int, Tensor> sent_; // the last message, by tag
  Clock::time_point free_ = Clock::now(); // when the link has carried everything of the CPU
#ifdef WITH_CUDA
  std::optional<c10::cuda::CUDAStream> stream_;
  std::shared_ptr<Event> end_; // of the link's last collective on the device
  bool was_captured_ = false;
#endif

  static void copy_all(const Tensors& outputs, const Tensor& input) {
    for (auto each : outputs)
      each.copy_(input.view_as(each));
  }

  double share() const { return double(size_ - 1) / size_; }

  // Writes the reduction of values that all ranks have alike.
  void reduce_all(const Tensors& outputs, const Tensors& inputs, const ReduceOp& op) const {
    TORCH_CHECK(op.op_ != ReduceOp::PRODUCT && op.op_ != ReduceOp::BXOR, "products and XORs of ranks cannot be simulated");
    double factor = op.op_ == ReduceOp::SUM ? size_ : 1;
    if (op.op_ == ReduceOp::PREMUL_SUM) {
      auto& given = static_cast<NCCLPreMulSumSupplement&>(*op.supplement_);
      factor = size_ * (given.tensor_factor.defined() ? given.tensor_factor.item<double>() : given.double_factor);
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
      auto output = outputs[i], input = inputs[i].view_as(output);
      bool is_integer = at::isIntegralType(input.scalar_type(), false);
      if (factor == 1 || input.scalar_type() == at::kBool)
        output.copy_(input);
      else
        at::mul_out(output, input, at::scalar_tensor(factor, is_integer ? at::kLong : at::kDouble));
    }
  }

  // Runs a collective that moves `bytes` over the link in so many rounds, and for which `copied` bytes are written here.
  template <typename Copy>
  WorkPtr run(const char* kind, double bytes, int rounds, double copied, bool is_async, const Tensors& tensors, Copy copy) {
    auto seconds = size_ == 1 ? 0 : rounds * latency + bytes / bandwidth;
    auto& [count, nbytes, taken] = totals[kind];
    count += 1, nbytes += int64_t(bytes), taken += seconds;
    auto work = c10::make_intrusive<SimulatedWork>();
#ifdef WITH_CUDA
    if (!tensors.empty() && tensors[0].is_cuda()) {
      c10::cuda::CUDAGuard guard(tensors[0].device());
      bool captures = c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
      TORCH_CHECK(clock_rate > 0 || !captures, "run a step before one is captured: its collectives time the device");
      if (clock_rate == 0)
        calibrate(tensors[0].device());
      auto current = c10::cuda::getCurrentCUDAStream();
      if (is_async && !stream_)
        stream_ = c10::cuda::getStreamFromPool(false, tensors[0].device().index());
      auto stream = is_async ? *stream_ : current;
      if (is_async) {
        Event ready;
        ready.record(current);
        ready.block(stream);
      }
      if (end_ && was_captured_ == captures)
        end_->block(stream);
      {
        c10::cuda::CUDAStreamGuard inside(stream);
        if (auto cycles = int64_t((seconds - copied / copy_rate) * clock_rate); cycles > 0)
          at::cuda::sleep(cycles);
        copy();
      }
      end_ = std::make_shared<Event>();
      end_->record(stream);
      was_captured_ = captures;
      if (!is_async)
        return {}; // nothing to wait for
      work->end = end_, work->stream = stream, work->used = tensors;
      return work;
    }
#endif
    copy();
    free_ = work->deadline = std::max(Clock::now(), free_) + std::chrono::duration_cast<Clock::duration>(Seconds(seconds));
    return work;
  }
};
} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("make", [](int rank, int size) -> c10::intrusive_ptr<Backend> { return c10::make_intrusive<Network>(rank, size); });
  m.def("connect", [](double seconds, double rate) { latency = seconds, bandwidth = rate; });
  m.def("totals", [] { return totals; });
  m.def("waited", [] { return waited; });
}

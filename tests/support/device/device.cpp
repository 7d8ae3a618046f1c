// A device that torch takes for an accelerator: memory of its own, two indices, a limit that can be set, and a count of
// every transfer. Its operations are the CPU's. Numbers in `device_counts` are in the order of `COUNTS` of the module.

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr int kIndices = 2;

enum Event { kIn, kOut, kAcross, kScalar, kSize, kOperation, kEvents };
std::atomic<int64_t> counts[kEvents];
std::atomic<int64_t> allocated[kIndices], peak[kIndices], limit[kIndices];
thread_local int current_index = 0;
thread_local bool in_fallback = false; // its own copies between CPU and device are no transfers of the program's

py::object& watcher() { // what is told of every transfer; never destroyed, since Python may be gone by then
  static auto* one = new py::object(py::none());
  return *one;
}
std::atomic<bool> is_watched{false}, is_every_watched{false}; // every: operations too

void note(Event event, int64_t bytes = 0, const char* name = "") {
  if (in_fallback) return;
  counts[event]++;
  if (!is_watched || (event == kOperation && !is_every_watched)) return;
  py::gil_scoped_acquire gil;
  if (!watcher().is_none()) watcher()(static_cast<int>(event), bytes, std::string(name));
}

struct Memory final : c10::Allocator {
  std::mutex lock;
  std::unordered_map<void*, std::pair<int, size_t>> blocks;

  c10::DataPtr allocate(size_t bytes) override {
    const int index = current_index;
    const c10::Device device(kDevice, index);
    if (!bytes) return {nullptr, nullptr, &release, device};
    const int64_t now = allocated[index] + static_cast<int64_t>(bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, !limit[index] || now <= limit[index], "device ", index, " out of memory: tried to ",
                     "allocate ", bytes, " bytes, ", limit[index].load() - allocated[index].load(), " are free");
    void* block = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    std::lock_guard guard(lock);
    blocks[block] = {index, bytes};
    allocated[index] += static_cast<int64_t>(bytes);
    if (allocated[index] > peak[index]) peak[index] = allocated[index].load();
    return {block, block, &release, device};
  }
  static void release(void* block);
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};

Memory& memory() {
  static auto* one = new Memory();
  return *one;
}

void Memory::release(void* block) {
  if (!block) return;
  std::lock_guard guard(memory().lock);
  const auto found = memory().blocks.find(block);
  allocated[found->second.first] -= static_cast<int64_t>(found->second.second);
  memory().blocks.erase(found);
  std::free(block);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto old = getDevice();
    uncheckedSetDevice(device);
    return old;
  }
  c10::Device getDevice() const override { return {kDevice, static_cast<c10::DeviceIndex>(current_index)}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kIndices, "there is no device ", device.index(), ": there are ", kIndices);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_index = device.index();
  }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return kIndices; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kIndices; }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_index); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    if (storage.nbytes() >= bytes) return;
    const c10::OptionalDeviceGuard guard(storage.device());
    auto block = memory().allocate(bytes);
    if (storage.nbytes()) std::memcpy(block.get(), storage.data(), storage.nbytes());
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(block));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

at::Tensor empty_memory_format(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                               std::optional<at::Device> device, std::optional<bool>,
                               std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &memory(), keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &memory(), keys, c10::dtype_or_default(dtype));
}

at::Tensor on_cpu(const at::Tensor& tensor) { // the same memory, as a CPU tensor sees it
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  const int64_t bytes = static_cast<int64_t>(from.nbytes());
  if (from.is_cpu()) note(kIn, bytes);
  else if (to.is_cpu()) note(kOut, bytes);
  else note(from.device() == to.device() ? kOperation : kAcross, bytes);
  if (from.numel() && to.numel()) on_cpu(to).copy_(on_cpu(from).resolve_conj().resolve_neg());
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  note(kScalar, static_cast<int64_t>(tensor.element_size()), "item");
  return on_cpu(tensor).item();
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef symbolic, std::optional<at::MemoryFormat>) {
  const auto size = C10_AS_INTARRAYREF_SLOW(symbolic);
  if (self.sizes() == size) return self; // a result that is written into a strided view keeps its strides
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const size_t bytes = (impl->storage_offset() + impl->numel()) * impl->itemsize();
  at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  return self;
}

at::Tensor strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> at) {
  return at::native::as_strided_tensorimpl(self, size, stride, at);
}

at::Tensor viewed(const at::Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }

at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return strided(self, size, stride, self.storage_offset());
}

at::Tensor unfolded(const at::Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}

at::Tensor& set_source(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  if (stride.data() == nullptr) self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  else self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return self;
}

// Operations whose result has a size, or is a number, that the host must wait for.
bool waits(const std::string& name, const torch::jit::Stack& stack) {
  static const std::unordered_set<std::string> always{
      "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::equal",
      "aten::unique_consecutive", "aten::is_nonzero"};
  if (always.count(name)) return true;
  if (name != "aten::index_put_" && name != "aten::_index_put_impl_") return false; // `index` asks `nonzero`
  for (const auto& value : stack) {
    if (!value.isList()) continue;
    for (const auto& item : value.toListRef()) {
      if (!item.isTensor() || !item.toTensor().defined()) continue;
      const auto kind = item.toTensor().scalar_type();
      if (kind == at::kBool || kind == at::kByte) return true;
    }
  }
  return false;
}

// As a graphics card has it: numbers, and indices in main memory, may come from anywhere, and nothing else.
void refuse_mixed(const std::string& name, const torch::jit::Stack& stack) {
  if (name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_") return;
  std::optional<c10::Device> first;
  const auto look = [&](const c10::IValue& value) {
    if (!value.isTensor() || !value.toTensor().defined() || value.toTensor().dim() == 0) return;
    const auto device = value.toTensor().device();
    TORCH_CHECK(!first || *first == device, "Expected all tensors to be on the same device, but ", name, " was given ",
                first.value_or(device), " and ", device);
    first = device;
  };
  for (const auto& value : stack) {
    if (value.isList()) for (const auto& item : value.toListRef()) look(item);
    else look(value);
  }
}

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  refuse_mixed(name, torch::jit::Stack(stack->end() - op.schema().arguments().size(), stack->end()));
  note(kOperation, 0, name.c_str());
  if (waits(name, *stack)) note(kSize, 0, name.c_str());
  struct Inside {
    bool before = in_fallback;
    Inside() { in_fallback = true; }
    ~Inside() { in_fallback = before; }
  } inside;
  at::native::cpu_fallback(op, stack);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("resize_", &resize_);
  m.impl("as_strided", &strided);
  m.impl("view", &viewed);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &unfolded);
  m.impl("set_.source_Storage_storage_offset", &set_source);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>()); }

// Under autocast products run in the lower precision, as on a graphics card.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("register_device", [] {
    static Hooks hooks;
    c10::SetAllocator(kDevice, &memory());
    at::RegisterPrivateUse1HooksInterface(&hooks);
  });
  m.def("counts", [] { return std::vector<int64_t>(counts, counts + kEvents); });
  m.def("watch", [](py::object one, bool every) {
    is_watched = !one.is_none();
    is_every_watched = every;
    watcher() = std::move(one);
  });
  m.def("allocated", [](int index) { return allocated[index].load(); });
  m.def("peak", [](int index) { return peak[index].load(); });
  m.def("reset_peak", [](int index) { peak[index] = allocated[index].load(); });
  m.def("limit", [](int index) { return limit[index].load(); });
  m.def("set_limit", [](int index, int64_t bytes) { limit[index] = bytes; });
  m.def("current", [] { return current_index; });
  m.def("set_current", [](int index) { current_index = index; });
}

// A CUDA device for fake tensors on a build of torch for CPUs: autograd asks for its streams, indexing for its guard.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
static const Device gpu(DeviceType::CUDA, 0);
struct Guard final : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return gpu; }
  Device getDevice() const override { return gpu; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, gpu); }
  Stream exchangeStream(Stream) const noexcept override { return getStream(gpu); }
};
static Guard guard;
struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
};
__attribute__((constructor)) static void install() {
  impl::device_guard_impl_registry[(int)DeviceType::CUDA].store(&guard);
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();  // torch may have asked
}

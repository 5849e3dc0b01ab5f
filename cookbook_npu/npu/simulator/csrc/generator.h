#pragma once
#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <optional>

namespace npusim {

const at::Generator& default_generator(int device);  // -1: of the current device
// The CPU generator behind a device generator, or behind the device's default one when none is given.
at::Generator host_generator(const std::optional<at::Generator>& generator, c10::Device device);
void reset_generators();  // the next one asked for is new
void register_hooks();

}  // namespace npusim

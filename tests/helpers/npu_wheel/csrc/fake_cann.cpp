// A CANN of host memory: what the real torch_npu needs of the Ascend driver and runtime to come up, hand out memory and keep streams.
//
// Signatures are those of the headers that the wheel ships. Streams and events are in streams.cpp, captured graphs in graphs.cpp.
// Nothing here computes. What is neither implemented nor in the list of harmless calls below becomes a generated stub that refuses (refuse.h):
// a stub that returned success would skip the computation without a word.
#include "graphs.h"
#include "refuse.h"
#include <acl/acl.h>
#include <acl/acl_op_compiler.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

constexpr aclError kOk = ACL_SUCCESS, kInvalidDevice = ACL_ERROR_RT_INVALID_DEVICEID, kNoContext = ACL_ERROR_RT_CONTEXT_NULL,
                   kOutOfMemory = ACL_ERROR_RT_MEMORY_ALLOCATION;
constexpr char kDisabled[] = "disable";
constexpr char kVersion[] = "9.0.0";
constexpr int kMaxDevices = 64;
constexpr size_t kAlignment = 512;  // what aclrtMalloc promises

const char* environment(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value ? value : otherwise;
}

// The variables of the simulated NPU, so that both lanes are set up alike.
int device_count() {
  const int total = std::atoi(environment("COOKBOOK_NPU_SIM_DEVICES", "8"));
  const char* visible = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (!visible) return total;
  std::istringstream ids(visible);
  int count = 0;
  for (std::string id; std::getline(ids, id, ',') && !id.empty() && std::atoi(id.c_str()) < total;) ++count;
  return count;
}
size_t capacity() { return std::strtoull(environment("COOKBOOK_NPU_SIM_MEMORY", "68719476736"), nullptr, 10); }

// ---- devices and contexts: the context of a device is the address of its element

char contexts[kMaxDevices];
std::atomic<bool> active[kMaxDevices];  // the primary context belongs to the process
thread_local int current = -1;          // which one is current belongs to the thread; -1: none

ptrdiff_t device_of(const void* context) { return static_cast<const char*>(context) - contexts; }

// ---- memory

// Memory of the device is an anonymous file: another process can open it by the handle of its owner.
struct File {
  int number;
  size_t bytes;  // whole pages
};
constexpr size_t kPage = 4096, kGranule = 2 << 20;

bool make_file(size_t bytes, File& file) {
  file.bytes = (bytes + kPage - 1) / kPage * kPage;
  file.number = memfd_create("fake_hbm", MFD_CLOEXEC);
  if (file.number < 0) return false;
  if (ftruncate(file.number, static_cast<off_t>(file.bytes)) == 0) return true;
  close(file.number);
  return false;
}
void* map_file(const File& file, void* where = nullptr, size_t offset = 0) {
  const int flags = MAP_SHARED | (where ? MAP_FIXED : 0);
  void* at = mmap(where, file.bytes, PROT_READ | PROT_WRITE, flags, file.number, static_cast<off_t>(offset));
  return at == MAP_FAILED ? nullptr : at;
}
// An address without memory: who reads it dies of SIGSEGV, as a device that reads it would fail.
void* map_nothing(void* where, size_t bytes) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (where ? MAP_FIXED : 0);
  void* at = mmap(where, bytes, PROT_NONE, flags, -1, 0);
  return at == MAP_FAILED ? nullptr : at;
}

struct Block {
  size_t bytes;
  int device;
  File file;
};
struct Physical {
  File file;
  int device;
};
std::mutex mutex;
size_t used[kMaxDevices];
std::map<void*, Block>& blocks() {
  static auto* table = new std::map<void*, Block>();  // never destroyed: tensors may outlive every static
  return *table;
}

aclError allocate(void** pointer, size_t bytes) {
  if (current < 0) return kNoContext;
  std::lock_guard<std::mutex> guard(mutex);
  *pointer = nullptr;
  if (used[current] + bytes > capacity()) return kOutOfMemory;
  File file;
  if (!make_file(bytes ? bytes : 1, file)) return kOutOfMemory;
  *pointer = map_file(file);
  if (!*pointer) {
    close(file.number);
    return kOutOfMemory;
  }
  used[current] += bytes;
  blocks()[*pointer] = {bytes, current, file};
  return kOk;
}

aclError release(void* pointer) {
  std::lock_guard<std::mutex> guard(mutex);
  const auto found = blocks().find(pointer);
  if (found == blocks().end()) return ACL_ERROR_INVALID_PARAM;
  used[found->second.device] -= found->second.bytes;
  munmap(pointer, found->second.file.bytes);
  close(found->second.file.number);
  blocks().erase(found);
  return kOk;
}

// Ranges of addresses, and files of other processes that are mapped here, by key.
template <class Key, class Value>
std::map<Key, Value>& table() {
  static auto* entries = new std::map<Key, Value>();  // never destroyed, as above
  return *entries;
}
struct Range {
  size_t bytes;
  bool mapped;
};
std::map<void*, Range>& reserved() { return table<void*, Range>(); }
using Opened = std::pair<void*, size_t>;
std::map<std::string, Opened>& opened() { return table<std::string, Opened>(); }

aclError copy(void* target, size_t room, const void* source, size_t bytes) {
  if (bytes > room) return ACL_ERROR_INVALID_PARAM;
  std::memmove(target, source, bytes);
  return kOk;
}

// ---- settings

int64_t& setting(aclSysParamOpt option) {
  static std::unordered_map<int, int64_t> values;
  std::lock_guard<std::mutex> guard(mutex);
  return values[option];
}

}  // namespace

std::string fake_cann::memory_state(uintptr_t at, size_t bytes) {
  std::lock_guard<std::mutex> guard(mutex);
  const auto holds = [&](const auto& table, const auto& size) {
    auto next = table.upper_bound(reinterpret_cast<void*>(at));
    if (next == table.begin() || at + bytes > reinterpret_cast<uintptr_t>((--next)->first) + size(next->second)) return table.end();
    return next;
  };
  const auto range = holds(reserved(), [](const Range& r) { return r.bytes; });
  if (range != reserved().end()) return range->second.mapped ? "" : "asleep, its memory is unmapped";
  const auto block = holds(blocks(), [](const Block& b) { return b.file.bytes; });
  if (block != blocks().end()) return "";
  for (const auto& [key, mapped] : opened()) {
    const auto start = reinterpret_cast<uintptr_t>(mapped.first);
    if (at >= start && at + bytes <= start + mapped.second) return "";
  }
  return "freed, no memory of this device";
}

extern "C" {

// ---- harmless: they configure or report, and torch_npu calls them whether or not anybody listens

aclError aclInit(const char*) { return kOk; }
aclError aclFinalize() { return kOk; }
aclError aclrtSetOpWaitTimeout(uint32_t) { return kOk; }
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return kOk; }
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return kOk; }
aclError aclSetCompileopt(aclCompileOpt, const char*) { return kOk; }  // of operators that are never compiled
void aclAppLog(aclLogLevel, const char*, const char*, uint32_t, const char*, ...) {}
int MsprofRegisterCallback(unsigned, void*) { return 0; }  // nobody profiles

// ---- what this device is

const char* aclrtGetSocName() { return "Ascend910B1"; }
const char* aclGetRecentErrMsg() { return refused_last(); }
aclError aclsysGetVersionStr(char*, char* version) {
  std::strcpy(version, kVersion);
  return kOk;
}
aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion* version) {
  *version = {};
  std::strcpy(version->version, kVersion);
  return kOk;
}
size_t aclGetCompileoptSize(aclCompileOpt) { return sizeof kDisabled; }
aclError aclGetCompileopt(aclCompileOpt, char* value, size_t length) {  // asked for jit_compile, which a 910B leaves off
  std::strncpy(value, kDisabled, length);
  return kOk;
}
aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo what, int64_t* value) {
  *value = what == ACL_DEVICE_INFO_VECTOR_CORE_NUM ? 48 : what == ACL_DEVICE_INFO_L2_SIZE ? 192 << 20 : 24;  // of a 910B1
  return kOk;
}
aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr what, int64_t* value) {
  *value = what == ACL_DEV_ATTR_VECTOR_CORE_NUM ? 48 : 24;
  return kOk;
}
aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t device, int32_t peer) {
  *can = device != peer;
  return kOk;
}

// ---- settings: kept, and read back by torch_npu when it applies them

aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  *value = setting(option);
  return kOk;
}
aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  setting(option) = value;
  return kOk;
}

aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) { return aclrtSetSysParamOpt(option, value); }

// ---- devices and contexts

aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = static_cast<uint32_t>(device_count());
  return kOk;
}
aclError aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= device_count()) return kInvalidDevice;
  current = device;
  active[device] = true;
  return kOk;
}
aclError aclrtResetDevice(int32_t device) {
  if (current == device) current = -1;
  active[device] = false;
  return kOk;
}
aclError aclrtGetDevice(int32_t* device) {
  *device = current;
  return current < 0 ? kNoContext : kOk;
}
aclError aclrtGetCurrentContext(aclrtContext* context) {
  *context = current < 0 ? nullptr : &contexts[current];
  return current < 0 ? kNoContext : kOk;
}
aclError aclrtSetCurrentContext(aclrtContext context) {
  const auto device = device_of(context);
  if (device < 0 || device >= device_count()) return ACL_ERROR_INVALID_PARAM;
  current = static_cast<int>(device);
  return kOk;
}
aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t* flags, int32_t* is_active) {
  if (flags) *flags = 0;
  *is_active = active[device];
  return kOk;
}

// ---- memory

aclError aclrtMalloc(void** pointer, size_t bytes, aclrtMemMallocPolicy) { return allocate(pointer, bytes); }
aclError aclrtMallocAlign32(void** pointer, size_t bytes, aclrtMemMallocPolicy) { return allocate(pointer, bytes); }
aclError aclrtFree(void* pointer) { return release(pointer); }
aclError aclrtMallocHost(void** pointer, size_t bytes) {
  return posix_memalign(pointer, kAlignment, bytes ? bytes : kAlignment) == 0 ? kOk : kOutOfMemory;
}
aclError aclrtFreeHost(void* pointer) {
  std::free(pointer);
  return kOk;
}
aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free, size_t* total) {
  if (current < 0) return kNoContext;
  std::lock_guard<std::mutex> guard(mutex);
  *total = capacity();
  *free = *total - used[current];
  return kOk;
}
aclError aclrtMemcpy(void* target, size_t room, const void* source, size_t bytes, aclrtMemcpyKind) {
  return copy(target, room, source, bytes);
}
aclError aclrtMemcpyAsync(void* target, size_t room, const void* source, size_t bytes, aclrtMemcpyKind, aclrtStream) {
  return copy(target, room, source, bytes);
}
aclError aclrtMemset(void* target, size_t, int32_t value, size_t bytes) {
  std::memset(target, value, bytes);
  return kOk;
}
aclError aclrtMemsetAsync(void* target, size_t room, int32_t value, size_t bytes, aclrtStream) {
  return aclrtMemset(target, room, value, bytes);
}

// ---- addresses apart from memory: what vllm-ascend's CaMemAllocator is made of

aclError aclrtMemGetAllocationGranularity(aclrtPhysicalMemProp*, aclrtMemGranularityOptions, size_t* granularity) {
  *granularity = kGranule;
  return kOk;
}
aclError aclrtReserveMemAddress(void** address, size_t bytes, size_t, void* wanted, uint64_t) {
  *address = map_nothing(wanted, bytes);
  if (!*address) return kOutOfMemory;
  std::lock_guard<std::mutex> guard(mutex);
  reserved()[*address] = {bytes, false};
  return kOk;
}
aclError aclrtReleaseMemAddress(void* address) {
  std::lock_guard<std::mutex> guard(mutex);
  const auto found = reserved().find(address);
  if (found == reserved().end()) return ACL_ERROR_INVALID_PARAM;
  munmap(address, found->second.bytes);
  reserved().erase(found);
  return kOk;
}
aclError aclrtMallocPhysical(aclrtDrvMemHandle* handle, size_t bytes, const aclrtPhysicalMemProp* what, uint64_t) {
  const int device = static_cast<int>(what->location.id);
  std::lock_guard<std::mutex> guard(mutex);
  File file;
  if (used[device] + bytes > capacity() || !make_file(bytes, file)) return kOutOfMemory;
  used[device] += file.bytes;
  *handle = reinterpret_cast<aclrtDrvMemHandle>(new Physical{file, device});
  return kOk;
}
aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
  auto* memory = reinterpret_cast<Physical*>(handle);
  std::lock_guard<std::mutex> guard(mutex);
  used[memory->device] -= memory->file.bytes;
  close(memory->file.number);
  delete memory;
  return kOk;
}
aclError aclrtMapMem(void* address, size_t, size_t offset, aclrtDrvMemHandle handle, uint64_t) {
  std::lock_guard<std::mutex> guard(mutex);
  const auto found = reserved().find(address);
  if (found == reserved().end() || !map_file(reinterpret_cast<Physical*>(handle)->file, address, offset)) return ACL_ERROR_INVALID_PARAM;
  found->second.mapped = true;
  return kOk;
}
aclError aclrtUnmapMem(void* address) {
  std::lock_guard<std::mutex> guard(mutex);
  const auto found = reserved().find(address);
  if (found == reserved().end() || !map_nothing(address, found->second.bytes)) return ACL_ERROR_INVALID_PARAM;
  found->second.mapped = false;
  const auto running = fake_cann::unfinished(reinterpret_cast<uintptr_t>(address), found->second.bytes);
  if (!running.empty()) fake_cann::report("aclrtUnmapMem of " + std::to_string(found->second.bytes) + " bytes, while " + running);
  return kOk;
}
aclError aclrtCreateContext(aclrtContext* context, int32_t device) {
  if (const auto code = aclrtSetDevice(device)) return code;
  *context = &contexts[device];
  return kOk;
}

// ---- memory that another process opens: the key names the process and its file

aclError aclrtIpcMemGetExportKey(void* pointer, size_t bytes, char* key, size_t length, uint64_t) {
  std::lock_guard<std::mutex> guard(mutex);
  const auto found = blocks().find(pointer);
  if (found == blocks().end() || bytes > found->second.file.bytes) return ACL_ERROR_INVALID_PARAM;
  const auto& file = found->second.file;
  const int written = std::snprintf(key, length, "%d:%d:%zu", getpid(), file.number, file.bytes);
  return written < static_cast<int>(length) ? kOk : ACL_ERROR_INVALID_PARAM;
}
aclError aclrtIpcMemImportByKey(void** pointer, const char* key, uint64_t) {
  int pid = 0;
  File file;
  if (std::sscanf(key, "%d:%d:%zu", &pid, &file.number, &file.bytes) != 3) return ACL_ERROR_INVALID_PARAM;
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, file.number);
  file.number = open(path, O_RDWR | O_CLOEXEC);
  if (file.number < 0) return ACL_ERROR_INVALID_PARAM;
  *pointer = map_file(file);
  close(file.number);
  if (!*pointer) return kOutOfMemory;
  std::lock_guard<std::mutex> guard(mutex);
  opened()[key] = {*pointer, file.bytes};
  return kOk;
}
aclError aclrtIpcMemClose(const char* key) {
  std::lock_guard<std::mutex> guard(mutex);
  const auto found = opened().find(key);
  if (found == opened().end()) return kOk;  // the exporter's own
  munmap(found->second.first, found->second.second);
  opened().erase(found);
  return kOk;
}
aclError aclrtIpcMemSetImportPid(const char*, int32_t*, size_t) { return kOk; }  // whoever can open the file may
aclError aclrtDeviceGetBareTgid(int32_t* pid) {
  *pid = getpid();
  return kOk;
}
#ifdef ACL_IPC_EVENT_HANDLE_SIZE  // torch_npu 2.10 and later
aclError aclrtIpcGetEventHandle(aclrtEvent, aclrtIpcEventHandle* handle) {
  std::memset(handle, 0, sizeof *handle);
  return kOk;
}
aclError aclrtIpcOpenEventHandle(aclrtIpcEventHandle, aclrtEvent* event) { return aclrtCreateEventWithFlag(event, 0); }
#endif

}  // extern "C"

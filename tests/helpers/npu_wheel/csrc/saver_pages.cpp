// Virtual memory for the fake CANN: reserved addresses, and physical memory that comes and goes under them.
//
// Linked into the libraries of torch_memory_saver, whose own aclrtFree stands before the device's: calls of the device go to the next library.
#include <acl/acl.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <mutex>
#include <unordered_map>

namespace {
template <typename F>
F next(const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}
std::mutex mutex;
std::unordered_map<void*, size_t> reserved, mapped;
std::unordered_map<void*, size_t> sizes;  // of physical memory, by its handle
void* pages(void* at, size_t bytes, int access, int more) {
  return mmap(at, bytes, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | more, -1, 0);
}
}  // namespace

extern "C" {
aclError aclrtReserveMemAddress(void** address, size_t bytes, size_t, void*, uint64_t) {
  *address = pages(nullptr, bytes, PROT_NONE, 0);
  if (*address == MAP_FAILED) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  std::lock_guard<std::mutex> guard(mutex);
  reserved[*address] = bytes;
  return ACL_SUCCESS;
}
aclError aclrtReleaseMemAddress(void* address) {
  std::lock_guard<std::mutex> guard(mutex);
  const auto found = reserved.find(address);
  if (found == reserved.end() || mapped.count(address)) return ACL_ERROR_INVALID_PARAM;
  munmap(address, found->second);
  reserved.erase(found);
  return ACL_SUCCESS;
}
// counted by the device's own allocator, which never touches it
aclError aclrtMallocPhysical(aclrtDrvMemHandle* handle, size_t bytes, const aclrtPhysicalMemProp*, uint64_t) {
  void* block = nullptr;
  const auto allocate = next<aclError (*)(void**, size_t, aclrtMemMallocPolicy)>("aclrtMalloc");
  if (const aclError error = allocate(&block, bytes, ACL_MEM_MALLOC_HUGE_FIRST)) return error;
  std::lock_guard<std::mutex> guard(mutex);
  sizes[block] = bytes;
  *handle = block;
  return ACL_SUCCESS;
}
aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
  {
    std::lock_guard<std::mutex> guard(mutex);
    if (!sizes.erase(handle)) return ACL_ERROR_INVALID_PARAM;
  }
  return next<aclError (*)(void*)>("aclrtFree")(handle);
}
aclError aclrtMapMem(void* address, size_t bytes, size_t, aclrtDrvMemHandle, uint64_t) {
  std::lock_guard<std::mutex> guard(mutex);
  const auto found = reserved.find(address);
  if (found == reserved.end() || found->second < bytes || mapped.count(address)) return ACL_ERROR_INVALID_PARAM;
  mapped[address] = bytes;
  return pages(address, bytes, PROT_READ | PROT_WRITE, MAP_FIXED) == address ? ACL_SUCCESS : ACL_ERROR_RT_MEMORY_ALLOCATION;
}
// what was there is lost, and to touch it ends the process
aclError aclrtUnmapMem(void* address) {
  std::lock_guard<std::mutex> guard(mutex);
  const auto found = mapped.find(address);
  if (found == mapped.end()) return ACL_ERROR_INVALID_PARAM;
  pages(address, found->second, PROT_NONE, MAP_FIXED);
  mapped.erase(found);
  return ACL_SUCCESS;
}
}

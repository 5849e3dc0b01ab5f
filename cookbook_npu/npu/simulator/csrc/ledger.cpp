#include "ledger.h"
#include "device.h"
#include <c10/util/Exception.h>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace npusim {

constexpr int kMaxProcesses = 256;

struct Ledger::Row {
  int64_t pid;
  uint64_t started;  // start time of the process: a pid alone may be reused
  uint64_t reserved[kMaxDevices];
};

struct Ledger::Table {
  Row rows[kMaxProcesses];
};

namespace {

// Field 22 of /proc/<pid>/stat; 0 when there is no such process.
uint64_t start_time(int64_t pid) {
  char path[64], text[1024];
  std::snprintf(path, sizeof path, "/proc/%ld/stat", static_cast<long>(pid));
  FILE* file = std::fopen(path, "r");
  if (!file) return 0;
  const size_t length = std::fread(text, 1, sizeof text - 1, file);
  std::fclose(file);
  text[length] = 0;
  const char* cursor = std::strrchr(text, ')');  // the command name may itself hold spaces and brackets
  if (!cursor) return 0;
  ++cursor;
  for (int field = 3; field < 22 && cursor; ++field) cursor = std::strchr(cursor + 1, ' ');
  return cursor ? std::strtoull(cursor + 1, nullptr, 10) : 0;
}

bool alive(int64_t pid, uint64_t started) {
  if (kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH) return false;
  const auto now = start_time(pid);
  return now == 0 || started == 0 || now == started;  // without /proc the pid alone decides
}

// An advisory lock on the table's file: the kernel drops it when its holder dies, so a killed process cannot block the others.
class FileLock {
 public:
  explicit FileLock(int fd) : fd_(fd) { while (fd_ >= 0 && flock(fd_, LOCK_EX) != 0 && errno == EINTR) {} }
  ~FileLock() { if (fd_ >= 0) flock(fd_, LOCK_UN); }
  FileLock(const FileLock&) = delete;

 private:
  int fd_;
};

// A shared lock of another kind on the same file, held as long as the process: whoever sweeps asks for it exclusively and learns whether anybody
// lives, in whatever PID namespace.
void hold_life_lock(int fd, const std::string& file) {
  struct flock whole{};
  whole.l_type = F_RDLCK;
  whole.l_whence = SEEK_SET;
  TORCH_CHECK(fcntl(fd, F_OFD_SETLK, &whole) == 0, "simulated NPU: cannot lock ", file, ": ", std::strerror(errno));
}

bool still_linked(int fd, const std::string& file) {
  struct stat opened{}, named{};
  return fstat(fd, &opened) == 0 && stat(file.c_str(), &named) == 0 && opened.st_ino == named.st_ino && opened.st_dev == named.st_dev;
}

}  // namespace

Ledger::Table& Ledger::table() {
  if (!table_) {
    table_ = new Table();  // lives as long as the process
    own_ = &table_->rows[0];
  }
  return *table_;
}

void Ledger::open(const std::string& file) {
  file_ = file;
  for (;;) {  // the last user may unlink the file between our open and our lock: then open the new one
    fd_ = ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    TORCH_CHECK(fd_ >= 0, "simulated NPU: cannot open the session table ", file, ": ", std::strerror(errno));
    FileLock lock(fd_);
    if (still_linked(fd_, file)) {
      hold_life_lock(fd_, file);
      TORCH_CHECK(ftruncate(fd_, sizeof(Table)) == 0, "simulated NPU: cannot size ", file, ": ", std::strerror(errno));
      void* mapped = mmap(nullptr, sizeof(Table), PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
      TORCH_CHECK(mapped != MAP_FAILED, "simulated NPU: cannot map ", file, ": ", std::strerror(errno));
      table_ = static_cast<Table*>(mapped);
      take_row();
      return;
    }
    ::close(fd_);
  }
}

void Ledger::take_row() {
  drop_dead_rows();
  for (auto& row : table_->rows) {
    if (row.pid != 0) continue;
    row = Row{};
    row.pid = owner_ = getpid();
    row.started = start_time(row.pid);
    own_ = &row;
    return;
  }
  TORCH_CHECK(false, "simulated NPU: more than ", kMaxProcesses, " processes share the session table ", file_);
}

void Ledger::drop_dead_rows() {
  for (auto& row : table_->rows) if (row.pid != 0 && !alive(row.pid, row.started)) row = Row{};
}

uint64_t Ledger::reserved_by_all(int physical_device) {
  if (fd_ < 0) return table().rows[0].reserved[physical_device];
  FileLock lock(fd_);
  drop_dead_rows();
  uint64_t sum = 0;
  for (auto& row : table_->rows) if (row.pid != 0) sum += row.reserved[physical_device];
  return sum;
}

bool Ledger::reserve(int physical_device, uint64_t bytes, uint64_t capacity) {
  table();
  if (fd_ >= 0 && owner_ != getpid()) {  // a fork of a process that had not used the devices: it gets a row, and a lock, of its own
    munmap(table_, sizeof(Table));
    ::close(fd_);
    open(file_);
  }
  FileLock lock(fd_);
  uint64_t sum = 0;
  for (auto& row : table_->rows) sum += row.reserved[physical_device];
  if (sum + bytes > capacity && fd_ >= 0) {
    drop_dead_rows();
    sum = 0;
    for (auto& row : table_->rows) sum += row.reserved[physical_device];
  }
  if (sum + bytes > capacity) return false;
  own_->reserved[physical_device] += bytes;
  return true;
}

void Ledger::give_back(int physical_device, uint64_t bytes) {
  FileLock lock(fd_);
  own_->reserved[physical_device] -= bytes;
}

void Ledger::close() {
  if (fd_ < 0) return;
  leave();
  munmap(table_, sizeof(Table));
  ::close(fd_);
  table_ = nullptr;
  own_ = nullptr;
  fd_ = -1;
}

void Ledger::leave() {
  if (fd_ < 0 || owner_ != getpid()) return;  // a forked child must not clear its parent's row
  FileLock lock(fd_);
  *own_ = Row{};
  drop_dead_rows();
  for (auto& row : table_->rows) if (row.pid != 0) return;
  unlink(file_.c_str());  // the last one out leaves nothing behind
}

}  // namespace npusim

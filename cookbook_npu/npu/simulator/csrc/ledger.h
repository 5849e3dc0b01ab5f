// The ledger: how many bytes each process has reserved on each device of the machine.
//
// Without a session it is a counter of this process. With one it is a small table in a file that all processes of the session map: one
// row per process. A row whose process has died is given back by the next process that needs room, so a killed worker frees its memory as
// it would on a real device.
#pragma once
#include <cstdint>
#include <string>
#include <sys/types.h>

namespace npusim {

class Ledger {
 public:
  void open(const std::string& file);
  bool reserve(int physical_device, uint64_t bytes, uint64_t capacity);  // false: no room, nothing changed
  void give_back(int physical_device, uint64_t bytes);
  uint64_t reserved_by_all(int physical_device);
  void leave();  // gives the row back; the table stays, for what is freed later
  void close();  // leaves, and goes on with a private table

 private:
  struct Row;
  struct Table;
  void take_row();
  void drop_dead_rows();
  Table* table_ = nullptr;  // a private one until open()
  Row* own_ = nullptr;
  int fd_ = -1;
  std::string file_;
  pid_t owner_ = 0;
  Table& table();
};

}  // namespace npusim

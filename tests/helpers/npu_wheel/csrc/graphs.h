// What the units of the fake CANN share, and what a bridge hands over of each launch.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fake_cann {

using Stream = void*;  // aclrtStream

// The bytes of one argument or result. fresh: memory that the launch itself took for its result
struct Touch {
  uintptr_t at;
  size_t bytes;
  bool written, fresh;
  bool overlaps(uintptr_t start, size_t size) const { return bytes && size && at < start + size && start < at + bytes; }
};

// Holds addresses, never tensors: whoever frees them is not stopped.
struct Launch {
  virtual ~Launch() = default;
  virtual void run() = 0;  // raises
  std::string name;
  std::vector<Touch> touches;
};

// What a bridge reports. It is not linked with CANN: fake_cann_recorder() is looked up by its name.
struct Recorder {
  virtual bool records(Stream stream) = 0;           // a launch on this stream is captured, or takes the place of a captured one
  virtual void record(std::unique_ptr<Launch> launch) = 0;
  virtual void keep(const Touch& touch) = 0;         // recording does not execute: its end puts these bytes back
  virtual std::string refusal(Stream stream) = 0;    // why this stream would never run a launch, or ""
  virtual void launched(Stream stream, const std::string& name, const std::vector<Touch>& touches) = 0;
  virtual void finished(Stream stream) = 0;          // the host has waited for the stream
  virtual std::string memory(uintptr_t at, size_t bytes) = 0;  // "" where all of it has memory, else what became of it
  virtual std::vector<std::string> graphs() = 0;     // JSON of each graph that is alive
  virtual std::vector<std::string> reports() = 0;    // hazards that were met
};

// ---- between the units

std::string memory_state(uintptr_t at, size_t bytes);                    // fake_cann.cpp
void launched(Stream stream, const std::string& name, const std::vector<Touch>& touches);  // streams.cpp
void finished(Stream stream);
std::string unfinished(uintptr_t at, size_t bytes);                      // launches that touch these bytes and may still run, or ""
void report(const std::string& text);
std::vector<std::string> reports();
size_t capture_of(Stream stream);                                        // graphs.cpp: id of the open capture, 0: none
void join_capture(Stream stream, size_t capture);                        // by waiting for an event of it
std::string stuck(Stream stream);                                        // whose value a replay on it waits for, or ""; nullptr: any stream

}  // namespace fake_cann

extern "C" fake_cann::Recorder* fake_cann_recorder();

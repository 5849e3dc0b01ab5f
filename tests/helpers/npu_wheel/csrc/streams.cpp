// Streams and events of the fake CANN, and the ledger of launches that nobody has waited for.
//
// Work is done when its call returns. On a device it may still run: each launch therefore counts as unfinished until the host has waited for
// its stream, or for an event behind it. Whoever unmaps memory that an unfinished launch touches, or touches on another stream what it writes
// without waiting for it there, has a race on a device.
#include "graphs.h"
#include "refuse.h"
#include <acl/acl.h>
#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <sstream>

namespace {

using fake_cann::Touch;
constexpr aclError kOk = ACL_SUCCESS;
constexpr size_t kMostUnfinished = 1 << 15;

using Clock = std::map<aclrtStream, size_t>;  // stream -> its launches that have finished
struct Unfinished {
  size_t index;
  std::string name;
  std::vector<Touch> touches;
};
struct Ledger {
  size_t launches = 0;
  Clock waited;  // for other streams
  std::deque<Unfinished> unfinished;
};
struct Stream {
  int32_t id;
};
struct Event {
  std::chrono::steady_clock::time_point time;
  Clock after;
  size_t capture = 0;    // recorded within it
  std::string behind{};  // a replay that waits
};

std::mutex mutex;
std::map<aclrtStream, Ledger>& ledgers() {
  static auto* all = new std::map<aclrtStream, Ledger>();  // never destroyed: tensors may outlive every static
  return *all;
}
std::vector<std::string>& reported() {
  static auto* all = new std::vector<std::string>();
  return *all;
}

Clock clock_of(aclrtStream stream) {
  Clock clock = ledgers()[stream].waited;
  clock[stream] = ledgers()[stream].launches;
  return clock;
}
void host_waits(const Clock& clock) {
  for (const auto& [stream, finished] : clock) {
    auto& queue = ledgers()[stream].unfinished;
    while (!queue.empty() && queue.front().index <= finished) queue.pop_front();
  }
}
const Touch* shared(const Unfinished& earlier, const std::vector<Touch>& touches) {
  for (const auto& a : touches)
    for (const auto& b : earlier.touches)
      if ((a.written || b.written) && a.overlaps(b.at, b.bytes)) return &a;
  return nullptr;
}

aclError make_stream(aclrtStream* stream) {
  static int32_t next = 0;
  std::lock_guard<std::mutex> guard(mutex);
  *stream = new Stream{next++};
  return kOk;
}
aclError make_event(aclrtEvent* event) {
  *event = new Event();
  return kOk;
}
aclError wait_for(const std::string& stuck, const char* who) {
  return stuck.empty() ? kOk : static_cast<aclError>(refuse_with(std::string(who) + " would wait forever: " + stuck));
}
aclError synchronize(aclrtStream stream, const char* who) {
  if (const auto code = wait_for(fake_cann::stuck(stream), who)) return code;
  fake_cann::finished(stream);
  return kOk;
}
aclError synchronize_all(const char* who) {
  if (const auto code = wait_for(fake_cann::stuck(nullptr), who)) return code;
  std::lock_guard<std::mutex> guard(mutex);
  for (auto& [stream, ledger] : ledgers()) ledger.unfinished.clear();
  return kOk;
}

}  // namespace

namespace fake_cann {

void report(const std::string& text) {
  refuse_with(text);
  std::lock_guard<std::mutex> guard(mutex);
  reported().push_back(text);
}
std::vector<std::string> reports() {
  std::lock_guard<std::mutex> guard(mutex);
  return reported();
}

void launched(fake_cann::Stream stream, const std::string& name, const std::vector<Touch>& touches) {
  std::string race;
  {
    std::lock_guard<std::mutex> guard(mutex);
    auto& own = ledgers()[stream];
    for (auto& [other, ledger] : ledgers()) {
      if (other == stream) continue;
      for (const auto& earlier : ledger.unfinished)
        if (race.empty() && earlier.index > own.waited[other] && shared(earlier, touches))
          race = name + " touches what " + earlier.name + " uses on another stream, and does not wait for it";
    }
    own.unfinished.push_back({++own.launches, name, touches});
    if (own.unfinished.size() > kMostUnfinished) own.unfinished.pop_front();
  }
  if (!race.empty()) report(race);
}
void finished(fake_cann::Stream stream) {
  std::lock_guard<std::mutex> guard(mutex);
  host_waits(clock_of(stream));
}
std::string unfinished(uintptr_t at, size_t bytes) {
  std::lock_guard<std::mutex> guard(mutex);
  size_t count = 0;
  std::string first;
  for (const auto& [stream, ledger] : ledgers())
    for (const auto& launch : ledger.unfinished)
      for (const auto& touch : launch.touches) {
        if (!touch.overlaps(at, bytes)) continue;
        if (!count++) first = launch.name + (touch.written ? " writes it" : " reads it");
        break;
      }
  return count ? std::to_string(count) + " launches that touch it are unfinished; the first: " + first : "";
}

}  // namespace fake_cann

extern "C" {

aclError aclrtCreateStream(aclrtStream* stream) { return make_stream(stream); }
aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) { return make_stream(stream); }
aclError aclrtDestroyStream(aclrtStream stream) {
  std::lock_guard<std::mutex> guard(mutex);
  ledgers().erase(stream);
  delete static_cast<Stream*>(stream);
  return kOk;
}
aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }
aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
  *id = static_cast<Stream*>(stream)->id;
  return kOk;
}
aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status) {
  const bool stuck = !fake_cann::stuck(stream).empty();
  if (!stuck) fake_cann::finished(stream);
  *status = stuck ? ACL_STREAM_STATUS_NOT_READY : ACL_STREAM_STATUS_COMPLETE;
  return kOk;
}
aclError aclrtSynchronizeDevice() { return synchronize_all("aclrtSynchronizeDevice"); }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return synchronize_all("aclrtSynchronizeDeviceWithTimeout"); }
aclError aclrtSynchronizeStream(aclrtStream stream) { return synchronize(stream, "aclrtSynchronizeStream"); }
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t) { return synchronize(stream, "aclrtSynchronizeStreamWithTimeout"); }
aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent which) {
  const auto* event = static_cast<Event*>(which);
  if (event->capture) fake_cann::join_capture(stream, event->capture);
  std::lock_guard<std::mutex> guard(mutex);
  auto& waited = ledgers()[stream].waited;
  for (const auto& [other, finished] : event->after) waited[other] = std::max(waited[other], finished);
  return kOk;
}
aclError aclrtGetStreamOverflowSwitch(aclrtStream, uint32_t* on) {
  *on = 0;
  return kOk;
}

aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t) { return make_event(event); }
aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) { return make_event(event); }
aclError aclrtDestroyEvent(aclrtEvent event) {
  delete static_cast<Event*>(event);
  return kOk;
}
aclError aclrtRecordEvent(aclrtEvent which, aclrtStream stream) {
  auto* event = static_cast<Event*>(which);
  event->time = std::chrono::steady_clock::now();
  event->capture = fake_cann::capture_of(stream);
  event->behind = fake_cann::stuck(stream);
  std::lock_guard<std::mutex> guard(mutex);
  event->after = clock_of(stream);
  return kOk;
}
aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return kOk; }
aclError aclrtSynchronizeEvent(aclrtEvent which) {
  const auto* event = static_cast<Event*>(which);
  if (!event->behind.empty() && fake_cann::stuck(nullptr) == event->behind) return wait_for(event->behind, "aclrtSynchronizeEvent");
  std::lock_guard<std::mutex> guard(mutex);
  host_waits(event->after);
  return kOk;
}
aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
  *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
  return aclrtSynchronizeEvent(event);
}
aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus* status) {
  *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
  return kOk;
}
aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent start, aclrtEvent end) {
  const auto elapsed = static_cast<Event*>(end)->time - static_cast<Event*>(start)->time;
  *milliseconds = std::chrono::duration<float, std::milli>(elapsed).count();
  return kOk;
}

}  // extern "C"

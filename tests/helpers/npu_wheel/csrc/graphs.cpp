// Graph capture of the fake CANN: launches with their addresses, values that streams wait for, task groups and their updates, replay.
//
// A device executes a replay behind the host's back, and stops at a value that nobody has written yet. Here the replay runs in the call that
// starts it up to that value, and goes on in the call that writes it. Whoever needs its stream in between would wait forever on a device, and
// is refused. One capture, update or replay at a time; the streams of a capture are one order.
#include "graphs.h"
#include "refuse.h"
#include <acl/acl.h>
#include <algorithm>
#include <cstring>
#include <set>
#include <sstream>

namespace {

using fake_cann::Launch;
using fake_cann::Touch;

struct Node {
  std::unique_ptr<Launch> launch;
  volatile uint64_t* cell = nullptr;  // without a launch: a value to wait for, or to write
  uint64_t value = 0;
  uint32_t flag = 0;
  bool writes = false;
};
struct Graph {
  size_t id;  // from 1
  std::vector<Node> nodes;
  size_t next = 0, replays = 0, updates = 0;
  aclrtStream stream = nullptr;  // of its replay
  bool alive = true;
};
struct Group {
  Graph* graph;
  size_t first, count;
};
struct Kept {
  uintptr_t at;
  std::string bytes;
};

std::vector<Graph*>& graphs() {
  static auto* all = new std::vector<Graph*>();  // never destroyed: their launches may hold objects of Python
  return *all;
}
Graph* capturing = nullptr;
std::set<aclrtStream> captured_streams;
Group* open_group = nullptr;
Group* updating = nullptr;
aclrtStream updating_stream = nullptr;
std::vector<std::unique_ptr<Launch>> replacements;
std::vector<Kept> kept;
Graph* suspended = nullptr;

aclError fail(const std::string& text) { return static_cast<aclError>(refuse_with(text)); }
std::string name_of(const Graph& graph) { return "graph " + std::to_string(graph.id); }

bool reached(const Node& node) {
  const uint64_t found = *node.cell;
  switch (node.flag) {
    case ACL_STREAM_WAIT_VALUE_GEQ: return found >= node.value;
    case ACL_STREAM_WAIT_VALUE_EQ: return found == node.value;
    case ACL_STREAM_WAIT_VALUE_AND: return found & node.value;
    default: return ~(found | node.value);
  }
}

// Recording has executed a launch to learn its shapes: memory from before gets back what it held.
void put_back() {
  for (auto it = kept.rbegin(); it != kept.rend(); ++it) std::memcpy(reinterpret_cast<void*>(it->at), it->bytes.data(), it->bytes.size());
  kept.clear();
}

std::string lost_memory(const Graph& graph) {
  const auto& launch = *graph.nodes[graph.next].launch;
  for (const auto& touch : launch.touches) {
    const auto state = touch.bytes ? fake_cann::memory_state(touch.at, touch.bytes) : "";
    if (state.empty()) continue;
    std::ostringstream text;
    text << "replay of " << name_of(graph) << ", launch " << graph.next << " (" << launch.name << ") " << (touch.written ? "writes" : "reads")
         << " 0x" << std::hex << touch.at << std::dec << ", " << touch.bytes << " bytes: " << state;
    return text.str();
  }
  return "";
}

// Goes on until the end, or a value that nobody has written.
aclError go_on(Graph* graph) {
  suspended = nullptr;
  for (; graph->next < graph->nodes.size(); ++graph->next) {
    auto& node = graph->nodes[graph->next];
    if (node.cell && node.writes) *node.cell = node.value;
    if (node.cell && !node.writes && !reached(node)) {
      suspended = graph;
      return ACL_SUCCESS;
    }
    if (!node.launch) continue;
    if (const auto lost = lost_memory(*graph); !lost.empty()) return fail(lost);
    fake_cann::launched(graph->stream, "replayed " + node.launch->name, node.launch->touches);
    try {
      node.launch->run();
    } catch (const std::exception& error) {
      return fail("replay of " + name_of(*graph) + ", " + node.launch->name + ": " + error.what());
    }
  }
  return ACL_SUCCESS;
}

std::string describe(const Graph& graph) {
  std::ostringstream out;
  out << "{\"id\": " << graph.id << ", \"replays\": " << graph.replays << ", \"updates\": " << graph.updates << ", \"launches\": [";
  const char* comma = "";
  for (const auto& node : graph.nodes) {
    if (!node.launch) continue;
    out << comma << "[\"" << node.launch->name << "\", [";
    const char* inner = "";
    for (const auto& t : node.launch->touches) {
      out << inner << "[" << t.at << ", " << t.bytes << ", " << t.written << ", " << t.fresh << "]";
      inner = ", ";
    }
    out << "]]";
    comma = ", ";
  }
  out << "]}";
  return out.str();
}

struct Records final : fake_cann::Recorder {
  bool records(fake_cann::Stream stream) override {
    return capturing ? captured_streams.count(stream) > 0 : updating && stream == updating_stream;
  }
  void record(std::unique_ptr<Launch> launch) override {
    if (capturing) capturing->nodes.push_back({std::move(launch)});
    else replacements.push_back(std::move(launch));
  }
  void keep(const Touch& touch) override {
    kept.push_back({touch.at, std::string(reinterpret_cast<const char*>(touch.at), touch.bytes)});
  }
  std::string refusal(fake_cann::Stream stream) override {
    const auto stuck = fake_cann::stuck(stream);
    return stuck.empty() ? "" : "a launch behind a replay that never ends: " + stuck;
  }
  void launched(fake_cann::Stream stream, const std::string& name, const std::vector<Touch>& touches) override {
    fake_cann::launched(stream, name, touches);
  }
  void finished(fake_cann::Stream stream) override { fake_cann::finished(stream); }
  std::string memory(uintptr_t at, size_t bytes) override { return fake_cann::memory_state(at, bytes); }
  std::vector<std::string> graphs() override {
    std::vector<std::string> all;
    for (const auto* graph : ::graphs()) if (graph->alive) all.push_back(describe(*graph));
    return all;
  }
  std::vector<std::string> reports() override { return fake_cann::reports(); }
};

}  // namespace

namespace fake_cann {

size_t capture_of(Stream stream) { return capturing && captured_streams.count(stream) ? capturing->id : 0; }
void join_capture(Stream stream, size_t capture) {
  if (capturing && capturing->id == capture) captured_streams.insert(stream);
}
std::string stuck(Stream stream) {
  if (!suspended || (stream && stream != suspended->stream)) return "";
  return name_of(*suspended) + " waits for a value that nobody has written, before launch " + std::to_string(suspended->next);
}

}  // namespace fake_cann

extern "C" {

fake_cann::Recorder* fake_cann_recorder() {
  static Records records;
  return &records;
}

aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode) {
  if (capturing) return fail("a capture within a capture");
  if (suspended) return fail("a capture, while " + fake_cann::stuck(nullptr));
  capturing = new Graph{graphs().size() + 1, {}};
  captured_streams = {stream};
  return ACL_SUCCESS;
}
aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus* status, aclmdlRI* graph) {
  const bool active = fake_cann::capture_of(stream);
  if (status) *status = active ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
  if (graph) *graph = active ? capturing : nullptr;
  return ACL_SUCCESS;
}
aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI* graph) {
  if (!fake_cann::capture_of(stream)) return fail("the end of a capture that did not begin on this stream");
  for (const auto& node : capturing->nodes)  // results are noise until the first replay
    for (const auto& t : node.launch ? node.launch->touches : std::vector<Touch>())
      if (t.fresh && t.bytes) std::memset(reinterpret_cast<void*>(t.at), 0xff, t.bytes);
  put_back();
  graphs().push_back(capturing);
  *graph = capturing;
  capturing = nullptr;
  captured_streams.clear();
  return ACL_SUCCESS;
}
aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode* mode) {
  static thread_local aclmdlRICaptureMode current = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
  std::swap(current, *mode);
  return ACL_SUCCESS;
}
aclError aclmdlRIExecuteAsync(aclmdlRI model, aclrtStream stream) {
  auto* graph = static_cast<Graph*>(model);
  if (suspended) return fail("a replay, while " + fake_cann::stuck(nullptr));
  if (capturing) return fail("a replay within a capture");
  graph->next = 0;
  graph->stream = stream;
  ++graph->replays;
  return go_on(graph);
}
aclError aclmdlRIDestroy(aclmdlRI model) {
  auto* graph = static_cast<Graph*>(model);
  graph->alive = false;  // task groups know it
  graph->nodes.clear();
  if (suspended == graph) suspended = nullptr;
  return ACL_SUCCESS;
}
aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue*) { return ACL_SUCCESS; }  // of reports
aclError aclrtGetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue* value) {
  std::memset(value, 0, sizeof *value);
  return ACL_SUCCESS;
}

// torch_npu's ExternalEvent is a value in the device's memory

aclError aclrtValueWait(void* cell, uint64_t value, uint32_t flag, aclrtStream stream) {
  Node node{nullptr, static_cast<uint64_t*>(cell), value, flag};
  if (!fake_cann::capture_of(stream)) return reached(node) ? ACL_SUCCESS : fail("a stream waits for a value that nobody has written");
  capturing->nodes.push_back(std::move(node));
  return ACL_SUCCESS;
}
aclError aclrtValueWrite(void* cell, uint64_t value, uint32_t, aclrtStream stream) {
  if (fake_cann::capture_of(stream)) {
    capturing->nodes.push_back({nullptr, static_cast<uint64_t*>(cell), value, 0, true});
    return ACL_SUCCESS;
  }
  *static_cast<volatile uint64_t*>(cell) = value;
  return suspended ? go_on(suspended) : ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskGrpBegin(aclrtStream stream) {
  if (!fake_cann::capture_of(stream) || open_group) return fail("a task group outside of a capture, or within another");
  open_group = new Group{capturing, capturing->nodes.size(), 0};
  return ACL_SUCCESS;
}
aclError aclmdlRICaptureTaskGrpEnd(aclrtStream, aclrtTaskGrp* handle) {
  if (!open_group) return fail("the end of a task group that did not begin");
  open_group->count = capturing->nodes.size() - open_group->first;
  *handle = open_group;
  open_group = nullptr;
  return ACL_SUCCESS;
}
aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream stream, aclrtTaskGrp handle) {
  if (capturing || updating) return fail("a task update within a capture or another update");
  auto* group = static_cast<Group*>(handle);
  if (!group->graph->alive) return fail("a task update of " + name_of(*group->graph) + ", which was destroyed");
  updating = group;
  updating_stream = stream;
  replacements.clear();
  return ACL_SUCCESS;
}
aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream) {
  if (!updating) return fail("the end of an update that did not begin");
  auto* group = updating;
  updating = nullptr;
  put_back();
  if (replacements.size() != group->count)
    return fail("a task group of " + std::to_string(group->count) + " launches is updated by " + std::to_string(replacements.size()));
  for (size_t i = 0; i < group->count; ++i) {
    auto& launch = group->graph->nodes[group->first + i].launch;
    if (!launch || launch->name != replacements[i]->name)
      return fail("a task group's " + (launch ? launch->name : "value") + " is updated by " + replacements[i]->name);
    launch = std::move(replacements[i]);
  }
  ++group->graph->updates;
  return ACL_SUCCESS;
}

}  // extern "C"

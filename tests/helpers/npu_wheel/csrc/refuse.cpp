#include "refuse.h"
#include <cstdio>

namespace {
thread_local std::string last;
}

int refuse_with(const std::string& text) {
  last = "[fake CANN] " + text;
  std::fprintf(stderr, "%s\n", last.c_str());
  return kRefused;
}

int refuse(const char* function) { return refuse_with(std::string(function) + " is not simulated"); }

const char* refused_last() { return last.c_str(); }

#include "refuse.h"
#include <cstdio>
#include <string>

namespace {
thread_local std::string last;
}

int refuse(const char* function) {
  last = std::string("[fake CANN] ") + function + " is not simulated";
  std::fprintf(stderr, "%s\n", last.c_str());
  return kRefused;
}

const char* refused_last() { return last.c_str(); }

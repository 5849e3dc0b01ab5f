// How the fake CANN says no: on stderr, in aclGetRecentErrMsg (which torch_npu puts into its exceptions), and with an error code.
#pragma once
#include <string>

constexpr int kRefused = 500001;  // ACL_ERROR_GE_FAILURE: not a code that a caller retries or takes for "feature not there"

int refuse(const char* function);        // notes and prints the name
int refuse_with(const std::string& text);  // the same with a text of the caller
const char* refused_last();              // the note, "" when nothing was refused

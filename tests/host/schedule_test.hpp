#pragma once
// What the test programs of csrc/schedule share.

#include <cstdio>
#include <cstdlib>
#include <vector>

// CHECK(condition, "format", values...)
#define CHECK(condition, ...)                                                   \
  do {                                                                          \
    if (!(condition)) {                                                         \
      std::printf("%s:%d: %s does not hold: ", __FILE__, __LINE__, #condition); \
      std::printf(__VA_ARGS__);                                                 \
      std::printf("\n");                                                        \
      std::exit(1);                                                             \
    }                                                                           \
  } while (false)

namespace flux::test {

using Wide = __int128;  // offsets are compared with a type that cannot overflow

struct Test {
  char const* name;
  void (*run)();
};

std::vector<Test> pieces_tests();     // pieces_test.cpp
std::vector<Test> workspace_tests();  // workspace_test.cpp
std::vector<Test> ar_tests();         // ar_schedule_test.cpp
std::vector<Test> ar_order_tests();   // ar_order_test.cpp
std::vector<Test> exchange_tests();   // exchange_test.cpp

}  // namespace flux::test

#define TEST(function) {#function, function}

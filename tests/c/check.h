/* What the C tests share: a check that says what did not hold, and ends the program. */
#ifndef CHECK_H
#define CHECK_H

#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                                              \
    do {                                                                                              \
        if (!(condition)) {                                                                           \
            fprintf(stderr, "%s:%d: %s\n  last error: %s\n", __FILE__, __LINE__, #condition,          \
                    pinpool_last_error());                                                            \
            exit(1);                                                                                  \
        }                                                                                             \
    } while (0)

#define ANSWERS(call, code)                                                                           \
    do {                                                                                              \
        int answer_ = (call);                                                                         \
        if (answer_ != (code)) {                                                                      \
            fprintf(stderr, "%s:%d: %s answers %s, not %s\n  last error: %s\n", __FILE__, __LINE__,   \
                    #call, pinpool_status_name(answer_), pinpool_status_name(code),                   \
                    pinpool_last_error());                                                            \
            exit(1);                                                                                  \
        }                                                                                             \
    } while (0)

#endif

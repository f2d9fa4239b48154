/* Checks of the tests of the C interface. */
#ifndef KL_CHECK_H
#define KL_CHECK_H

#include <kickless_driver.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Checks a condition. Prints it if it does not hold. */
#define CHECK(holds)                                                                              \
    do {                                                                                          \
        if (!(holds)) {                                                                           \
            fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #holds, kl_last_error());     \
            exit(1);                                                                              \
        }                                                                                         \
    } while (0)
/* Checks that a call fails with this error and a reason. */
#define REFUSED(errno_value, sentence, call)                                                      \
    do {                                                                                          \
        long long result_ = (call);                                                               \
        if (result_ != -(errno_value) || !strstr(kl_last_error(), (sentence))) {                  \
            fprintf(stderr, "%s:%d: %s is %lld (%s)\n", __FILE__, __LINE__, #call, result_,       \
                    kl_last_error());                                                             \
            exit(1);                                                                              \
        }                                                                                         \
    } while (0)

#endif

/* Notes where one thread of this process is, at fixed intervals of real time: its instruction pointer and the top of
 * its stack. A signal handler in C does that, so that code which holds Python's lock is seen like any other. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>

#define MAX_SAMPLES 20000
#define NUM_WORDS 64 /* pages below the top of a thread's stack are there: no read can go beyond its end */

#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif

struct sample {
    uint64_t at;
    uint64_t stack[NUM_WORDS];
};

static struct sample samples[MAX_SAMPLES];
static volatile long num_samples;
static timer_t timer;

static void on_tick(int number, siginfo_t *info, void *context) {
    (void)number, (void)info;
    long i = num_samples;
    if (i == MAX_SAMPLES) return;
    mcontext_t *machine = &((ucontext_t *)context)->uc_mcontext;
#if defined(__x86_64__)
    uint64_t at = machine->gregs[REG_RIP], top = machine->gregs[REG_RSP];
#elif defined(__aarch64__)
    uint64_t at = machine->pc, top = machine->sp;
#endif
    samples[i].at = at;
    memcpy(samples[i].stack, (void *)top, sizeof samples[i].stack);
    num_samples = i + 1;
}

/* Sample thread `tid` every `interval_ns`. 0, or -1 where that is not possible. */
int sampler_start(int tid, long interval_ns) {
    struct sigaction action = {.sa_sigaction = on_tick, .sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK};
    if (sigaction(SIGRTMIN + 5, &action, NULL) != 0) return -1;
    struct sigevent event = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGRTMIN + 5};
    event.sigev_notify_thread_id = tid;
    if (timer_create(CLOCK_MONOTONIC, &event, &timer) != 0) return -1;
    struct itimerspec every = {{0, interval_ns}, {0, interval_ns}};
    num_samples = 0;
    return timer_settime(timer, 0, &every, NULL);
}

/* Stop; the number of samples, which are at `sampler_samples`. */
long sampler_stop(void) {
    timer_delete(timer);
    return num_samples;
}

struct sample *sampler_samples(void) { return samples; }

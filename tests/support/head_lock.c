/* Threads that take the lock of CPython's list of threads, without the GIL, as a thread does that calls into Python for the first time. Again and
   again they stop where they are, as where cores are short; if one has the lock then, they stay so for HELD. No offset into Python is needed: a
   prober that takes the lock too gets no further. */
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#define TAKERS 3
#define HELD 50000 /* microseconds */
extern void *PyInterpreterState_Main(void);
extern void *PyThreadState_New(void *interpreter);
extern void PyThreadState_Delete(void *state);

static void *interpreter;
static pthread_t takers[TAKERS];
static volatile int stopped, paused, probes;

static void pause_here(int number) {
    __atomic_add_fetch(&paused, 1, __ATOMIC_SEQ_CST);
    while (stopped) usleep(100);
    __atomic_sub_fetch(&paused, 1, __ATOMIC_SEQ_CST);
}

static void take_and_release(void) { PyThreadState_Delete(PyThreadState_New(interpreter)); }

static void *take(void *unused) {
    for (;;) take_and_release();
}

static void *probe(void *unused) {
    for (;; probes++) {
        take_and_release();
        usleep(50);
    }
}

static void *stop_them(void *unused) {
    for (;; usleep(100)) {
        stopped = 1;
        for (int i = 0; i < TAKERS; i++) pthread_kill(takers[i], SIGRTMIN + 5);
        while (paused < TAKERS) usleep(10);
        int before = probes, waited = 0;
        while (probes < before + 2 && waited++ < 20) usleep(100);
        if (probes < before + 2) usleep(HELD);
        stopped = 0;
        while (paused) usleep(10);
    }
}

void start(void) {
    pthread_t other;
    interpreter = PyInterpreterState_Main();
    signal(SIGRTMIN + 5, pause_here);
    for (int i = 0; i < TAKERS; i++) pthread_create(&takers[i], 0, take, 0);
    pthread_create(&other, 0, probe, 0);
    pthread_create(&other, 0, stop_them, 0);
}

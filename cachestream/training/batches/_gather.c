/* Gathers rows into batches in threads of its own, which never touch the interpreter.

   A Queue runs tasks in order. A task copies the rows of `count` samples, given by shard and row, one after the other into
   the memory given for each field. The caller keeps that memory until the task is done: a task holds addresses only. The
   first thread works on all tasks; the others help while a thread waits. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030a0000
#include <Python.h>

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#define MOST_WAITING 4096 /* tasks that are not done yet */
#define MOST_THREADS 16
#define LINE 64
#define ROWS_AHEAD 2
#define LONG_ROW_BYTES 4096
#define START_BYTES 1024 /* prefetched of the next long row: the processor prefetches the rest by itself */
#define SIGNALS_S 0.2 /* the longest wait between two checks for signals */
#define EXIT_S 30 /* the longest wait for running tasks at the end of the interpreter: a disk may be slow */

/* One field of a task: sample i of it lies at base[shard of i] + (row of i) * row_bytes. */
typedef struct {
    const int64_t *base;
    int64_t row_bytes;
    char *out;
} Column;

typedef struct {
    const int64_t *shards;
    const int64_t *rows;
    int64_t count;
    int64_t num_columns;
    int non_temporal; /* write long rows with non-temporal stores */
    Column columns[];
} Task;

/* The times of a task, in seconds of CLOCK_MONOTONIC, and the system's number of its thread. */
typedef struct {
    double began_s;
    double ended_s;
    long thread;
} Span;

/* Owned by the Queue object and its threads; the last owner frees it. */
typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t work; /* for the first thread */
    pthread_cond_t help; /* for the others */
    pthread_cond_t done; /* for threads in wait() */
    pthread_cond_t gone; /* a thread has ended */
    Task *tasks[MOST_WAITING];
    unsigned char finished[MOST_WAITING];
    Span *spans;        /* of the last tasks that are done; NULL while they are not timed */
    uint64_t submitted; /* number of tasks submitted, */
    uint64_t begun;     /* number of tasks begun, in order, */
    uint64_t completed; /* and the number up to which all tasks are done */
    uint64_t awaited;   /* the least task number that a thread waits for, while there are waiters */
    int waiters;
    int threads;
    int most_threads;
    int has_first; /* a thread has become the first */
    int stopped;
    int owners;
    pid_t pid;
} Shared;

typedef struct {
    PyObject_HEAD
    Shared *shared;
} Queue;

/* When the interpreter ends it frees memory that tasks use: no task of any Queue may run then. */
static atomic_int running;
static atomic_int exiting;

static double now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

/* --- gathering */

#ifdef __x86_64__
/* Non-temporal stores: the row is read much later, and a line that is not fetched before it is written saves a third of the
   memory traffic. Stores of 32 bytes: 16 are a tenth slower, 64 no faster. */
__attribute__((target("avx2"))) static void stream_row(char *out, const char *row, int64_t row_bytes)
{
    int64_t at = -(intptr_t)out & (LINE - 1); /* offset of the first whole line of `out` */
    memcpy(out, row, (size_t)at);
    for (; at + LINE <= row_bytes; at += LINE) {
        __m256i low = _mm256_loadu_si256((const __m256i *)(row + at));
        __m256i high = _mm256_loadu_si256((const __m256i *)(row + at) + 1);
        _mm256_stream_si256((__m256i *)(out + at), low);
        _mm256_stream_si256((__m256i *)(out + at) + 1, high);
    }
    memcpy(out + at, row + at, (size_t)(row_bytes - at));
}
#endif

static inline void copy_long_row(char *out, const char *row, int64_t row_bytes)
{
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2")) {
        stream_row(out, row, row_bytes);
        return;
    }
#endif
    memcpy(out, row, (size_t)row_bytes);
}

static inline const char *row_at(const Task *task, const Column *column, int64_t i, int64_t row_bytes)
{
    return (const char *)(column->base[task->shards[i]] + task->rows[i] * row_bytes);
}

static inline void prefetch(const char *from, int64_t num_bytes)
{
    for (int64_t at = 0; at < num_bytes; at += LINE)
        __builtin_prefetch(from + at, 0, 1);
}

static void copy_long_rows(const Task *task, const Column *column)
{
    const int64_t row_bytes = column->row_bytes;
    char *out = column->out;
    for (int64_t i = 0; i < task->count; i++, out += row_bytes) {
        if (i + 1 < task->count)
            prefetch(row_at(task, column, i + 1, row_bytes), START_BYTES);
        copy_long_row(out, row_at(task, column, i, row_bytes), row_bytes);
    }
#ifdef __x86_64__
    _mm_sfence(); /* before other threads learn that the task is done */
#endif
}

static inline void copy_rows(const Task *task, const Column *column, int64_t row_bytes)
{
    const int64_t count = task->count;
    char *out = column->out;
    for (int64_t i = 0; i < count; i++, out += row_bytes) {
        if (i + ROWS_AHEAD < count) /* the processor sees no pattern in the addresses of short rows */
            prefetch(row_at(task, column, i + ROWS_AHEAD, row_bytes), row_bytes);
        memcpy(out, row_at(task, column, i, row_bytes), (size_t)row_bytes);
    }
}

static void run(const Task *task)
{
    for (int64_t i = 0; i < task->num_columns; i++) {
        const Column *column = &task->columns[i];
        switch (column->row_bytes) { /* for a constant size, memcpy is an instruction and not a call */
        case 1: copy_rows(task, column, 1); break;
        case 2: copy_rows(task, column, 2); break;
        case 4: copy_rows(task, column, 4); break;
        case 8: copy_rows(task, column, 8); break;
        default:
            if (task->non_temporal && column->row_bytes >= LONG_ROW_BYTES)
                copy_long_rows(task, column);
            else
                copy_rows(task, column, column->row_bytes);
        }
    }
}

/* --- threads */

static void release(Shared *shared) /* with the lock, which is unlocked here */
{
    int last = --shared->owners == 0;
    pthread_cond_broadcast(&shared->gone);
    pthread_mutex_unlock(&shared->lock);
    if (!last)
        return;
    for (uint64_t i = shared->begun; i < shared->submitted; i++)
        free(shared->tasks[i % MOST_WAITING]);
    pthread_cond_destroy(&shared->work);
    pthread_cond_destroy(&shared->help);
    pthread_cond_destroy(&shared->done);
    pthread_cond_destroy(&shared->gone);
    pthread_mutex_destroy(&shared->lock);
    free(shared->spans);
    free(shared);
}

static int has_work(const Shared *shared, int first)
{
    return shared->begun < shared->submitted && (first || shared->waiters);
}

/* With the lock: mark the task as finished, and return whether a waiting thread must be woken. */
static int finish(Shared *shared, uint64_t number)
{
    shared->finished[number % MOST_WAITING] = 1;
    while (shared->completed < shared->begun && shared->finished[shared->completed % MOST_WAITING])
        shared->finished[shared->completed++ % MOST_WAITING] = 0;
    if (!shared->waiters || shared->completed < shared->awaited)
        return 0;
    shared->awaited = UINT64_MAX; /* threads that still wait set it again */
    return 1;
}

static void *work(void *given)
{
    Shared *shared = given;
    int tell = 0; /* broadcast after unlocking: woken threads need the lock */
    pthread_mutex_lock(&shared->lock);
    const int first = !shared->has_first;
    shared->has_first = 1;
    for (;;) {
        while (!shared->stopped && !tell && !has_work(shared, first))
            pthread_cond_wait(first ? &shared->work : &shared->help, &shared->lock);
        if (shared->stopped)
            break;
        Task *task = NULL;
        uint64_t number = 0;
        Span span = {0};
        const int timed = shared->spans != NULL;
        if (has_work(shared, first)) {
            /* Before `exiting` is read: either at_exit() sees this task, or this thread sees `exiting` */
            atomic_fetch_add(&running, 1);
            if (atomic_load(&exiting)) {
                atomic_fetch_sub(&running, 1);
                shared->stopped = 1;
                break;
            }
            number = shared->begun++;
            task = shared->tasks[number % MOST_WAITING];
        }
        pthread_mutex_unlock(&shared->lock);
        if (tell)
            pthread_cond_broadcast(&shared->done);
        tell = 0;
        if (task) {
            if (timed)
                span = (Span){.began_s = now(), .thread = syscall(SYS_gettid)};
            run(task);
            free(task);
            atomic_fetch_sub(&running, 1);
        }
        pthread_mutex_lock(&shared->lock);
        if (task && timed) {
            span.ended_s = now();
            shared->spans[number % MOST_WAITING] = span;
        }
        if (task)
            tell = finish(shared, number);
    }
    pthread_cond_broadcast(&shared->done);
    release(shared);
    return NULL;
}

static int start_thread(Shared *shared) /* with the lock; returns errno */
{
    pthread_t thread;
    sigset_t all, before;
    /* All signals are blocked here, so that they interrupt a thread of the interpreter instead. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&thread, NULL, work, shared);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error)
        return error;
    pthread_detach(thread);
    shared->threads++;
    shared->owners++;
    return 0;
}

static struct timespec deadline(double timeout_s)
{
    struct timespec at;
    if (!(timeout_s > 0)) /* also for NaN */
        timeout_s = 0;
    if (timeout_s > 1e8)
        timeout_s = 1e8;
    clock_gettime(CLOCK_MONOTONIC, &at);
    int64_t ns = at.tv_nsec + (int64_t)((timeout_s - (double)(int64_t)timeout_s) * 1e9);
    at.tv_sec += (time_t)timeout_s + ns / 1000000000;
    at.tv_nsec = ns % 1000000000;
    return at;
}

/* --- the Python object */

static int check(Shared *shared)
{
    if (shared->pid != getpid()) {
        PyErr_SetString(PyExc_RuntimeError, "this Queue belongs to another process: threads do not survive a fork");
        return -1;
    }
    return 0;
}

static PyObject *queue_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"threads", NULL};
    int threads = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|i", names, &threads))
        return NULL;
    if (threads < 1 || threads > MOST_THREADS)
        return PyErr_Format(PyExc_ValueError, "threads=%d: give 1 to %d", threads, MOST_THREADS);
    Shared *shared = calloc(1, sizeof *shared);
    if (!shared)
        return PyErr_NoMemory();
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&shared->lock, NULL);
    pthread_cond_init(&shared->work, NULL);
    pthread_cond_init(&shared->help, NULL);
    pthread_cond_init(&shared->done, &monotonic);
    pthread_cond_init(&shared->gone, &monotonic);
    pthread_condattr_destroy(&monotonic);
    shared->pid = getpid();
    shared->most_threads = threads;
    shared->awaited = UINT64_MAX;
    shared->owners = 1;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Queue *self = (Queue *)allocate(type, 0);
    if (!self) {
        pthread_mutex_lock(&shared->lock);
        release(shared);
        return NULL;
    }
    self->shared = shared;
    return (PyObject *)self;
}

static void queue_dealloc(Queue *self)
{
    Shared *shared = self->shared;
    if (shared->pid == getpid()) { /* in a forked child, the lock may be held by a thread that does not exist there */
        pthread_mutex_lock(&shared->lock);
        shared->stopped = 1;
        pthread_cond_broadcast(&shared->work);
        pthread_cond_broadcast(&shared->help);
        release(shared);
    }
    PyTypeObject *type = Py_TYPE(self);
    freefunc drop = (freefunc)PyType_GetSlot(type, Py_tp_free);
    drop(self);
    Py_DECREF(type);
}

/* From shards, rows, count, columns, outs, non_temporal: see submit(). */
static Task *make_task(PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 6 || !PyTuple_Check(args[3]) || !PyTuple_Check(args[4])) {
        PyErr_SetString(PyExc_TypeError,
            "give shards, rows, count, columns, outs, non_temporal: three ints, two tuples and a bool");
        return NULL;
    }
    int64_t shards = PyLong_AsLongLong(args[0]), rows = PyLong_AsLongLong(args[1]), count = PyLong_AsLongLong(args[2]);
    int non_temporal = PyObject_IsTrue(args[5]);
    if (PyErr_Occurred())
        return NULL;
    Py_ssize_t fields = PyTuple_Size(args[4]);
    if (PyTuple_Size(args[3]) != 2 * fields || count < 0 || fields > 65536) {
        PyErr_SetString(PyExc_ValueError, "give two numbers a field in `columns`, one in `outs`, and a count of 0 or more");
        return NULL;
    }
    Task *task = malloc(sizeof *task + (size_t)fields * sizeof(Column));
    if (!task) {
        PyErr_NoMemory();
        return NULL;
    }
    task->shards = (const int64_t *)(intptr_t)shards;
    task->rows = (const int64_t *)(intptr_t)rows;
    task->count = count;
    task->num_columns = fields;
    task->non_temporal = non_temporal;
    for (Py_ssize_t i = 0; i < fields; i++) {
        int64_t base = PyLong_AsLongLong(PyTuple_GetItem(args[3], 2 * i));
        int64_t row_bytes = PyLong_AsLongLong(PyTuple_GetItem(args[3], 2 * i + 1));
        int64_t out = PyLong_AsLongLong(PyTuple_GetItem(args[4], i));
        if (!PyErr_Occurred() && row_bytes < 0)
            PyErr_SetString(PyExc_ValueError, "a row has 0 bytes or more");
        if (PyErr_Occurred()) {
            free(task);
            return NULL;
        }
        task->columns[i] = (Column){(const int64_t *)(intptr_t)base, row_bytes, (char *)(intptr_t)out};
    }
    return task;
}

PyDoc_STRVAR(submit_doc,
"submit(shards: int, rows: int, count: int, columns: tuple[int, ...], outs: tuple[int, ...], non_temporal: bool) -> int\n--\n\n"
"Gather `count` samples soon; returns the task's number, for `wait`. `shards` and `rows` are the addresses of\n"
"int64 [count]; `columns` has two numbers a field: the address of its shards' first rows, int64 [shards], and the\n"
"bytes of a row; `outs` is where each field goes. All of that memory must stay until the task is done. With\n"
"`non_temporal`, long rows bypass the caches: for batches that would be evicted from them before they are read.");

static PyObject *queue_submit(Queue *self, PyObject *const *args, Py_ssize_t num_args)
{
    Shared *shared = self->shared;
    Task *task = make_task(args, num_args);
    if (!task)
        return NULL;
    if (check(shared)) {
        free(task);
        return NULL;
    }
    pthread_mutex_lock(&shared->lock);
    const char *refused = NULL;
    int error = 0;
    if (shared->stopped)
        refused = "this Queue is closed";
    else if (shared->submitted - shared->completed >= MOST_WAITING)
        refused = "too many tasks wait";
    else if (!shared->threads)
        error = start_thread(shared);
    uint64_t number = 0;
    if (!refused && !error) {
        shared->tasks[shared->submitted % MOST_WAITING] = task;
        number = ++shared->submitted;
    }
    pthread_mutex_unlock(&shared->lock);
    if (number) {
        pthread_cond_signal(&shared->work);
        return PyLong_FromUnsignedLongLong(number);
    }
    free(task);
    if (refused) {
        PyErr_SetString(PyExc_RuntimeError, refused);
        return NULL;
    }
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

/* Without the GIL: return whether the task is done by `until`; `ended` is set if the queue is closed. */
static int await_task(Shared *shared, uint64_t number, const struct timespec *until, int *ended)
{
    pthread_mutex_lock(&shared->lock);
    shared->waiters++;
    if (shared->begun < shared->submitted && shared->most_threads > 1) {
        if (shared->threads < shared->most_threads)
            (void)start_thread(shared); /* if it fails, the first thread does all */
        else
            pthread_cond_broadcast(&shared->help);
    }
    while (shared->completed < number && !shared->stopped) {
        if (number < shared->awaited)
            shared->awaited = number;
        if (pthread_cond_timedwait(&shared->done, &shared->lock, until) == ETIMEDOUT)
            break;
    }
    int done = shared->completed >= number;
    *ended = shared->stopped;
    shared->waiters--;
    pthread_mutex_unlock(&shared->lock);
    return done;
}

PyDoc_STRVAR(wait_doc,
"wait(number: int, timeout_s: float) -> bool\n--\n\n"
"Wait until task `number` and all before it are done, without the GIL; False when that takes longer, or the queue is\n"
"closed. Signals are handled meanwhile.");

static PyObject *queue_wait(Queue *self, PyObject *const *args, Py_ssize_t num_args)
{
    Shared *shared = self->shared;
    if (num_args != 2) {
        PyErr_SetString(PyExc_TypeError, "wait() takes number and timeout_s");
        return NULL;
    }
    uint64_t number = PyLong_AsUnsignedLongLong(args[0]);
    double timeout_s = PyFloat_AsDouble(args[1]);
    if (PyErr_Occurred() || check(shared))
        return NULL;
    pthread_mutex_lock(&shared->lock);
    int done = shared->completed >= number, unknown = number > shared->submitted;
    pthread_mutex_unlock(&shared->lock);
    if (unknown)
        return PyErr_Format(PyExc_ValueError, "wait(): no task has this number yet");
    double left_s = timeout_s > 0 ? timeout_s : 0; /* also for NaN */
    for (int ended = 0; !done && left_s > 0 && !ended;) {
        Py_BEGIN_ALLOW_THREADS
        double begun_s = now();
        struct timespec soon = deadline(left_s < SIGNALS_S ? left_s : SIGNALS_S);
        done = await_task(shared, number, &soon, &ended);
        double took_s = now() - begun_s; /* longer if the process was stopped: that time does not count */
        left_s -= took_s < SIGNALS_S ? took_s : SIGNALS_S;
        Py_END_ALLOW_THREADS
        if (!done && PyErr_CheckSignals())
            return NULL;
    }
    return PyBool_FromLong(done);
}

static PyObject *read_number(Shared *shared, const uint64_t *number)
{
    if (check(shared))
        return NULL;
    pthread_mutex_lock(&shared->lock);
    uint64_t found = *number;
    pthread_mutex_unlock(&shared->lock);
    return PyLong_FromUnsignedLongLong(found);
}

PyDoc_STRVAR(completed_doc, "completed() -> int\n--\n\nThe number of the last task up to which all are done.");

static PyObject *queue_completed(Queue *self, PyObject *Py_UNUSED(none))
{
    return read_number(self->shared, &self->shared->completed);
}

PyDoc_STRVAR(submitted_doc, "submitted() -> int\n--\n\nThe number of the last task that was submitted; 0 before the first.");

static PyObject *queue_submitted(Queue *self, PyObject *Py_UNUSED(none))
{
    return read_number(self->shared, &self->shared->submitted);
}

PyDoc_STRVAR(span_doc,
"span(number: int) -> tuple[float, float, int] | None\n--\n\n"
"When task `number`, which is done, began and ended, in seconds of CLOCK_MONOTONIC, and the system's number of its\n"
"thread. None if it was not timed: the first call has all further tasks timed.");

static PyObject *queue_span(Queue *self, PyObject *arg)
{
    Shared *shared = self->shared;
    uint64_t number = PyLong_AsUnsignedLongLong(arg);
    if (PyErr_Occurred() || check(shared))
        return NULL;
    Span span = {0};
    pthread_mutex_lock(&shared->lock);
    if (!shared->spans)
        shared->spans = calloc(MOST_WAITING, sizeof *shared->spans);
    else if (number && number <= shared->completed)
        span = shared->spans[(number - 1) % MOST_WAITING];
    pthread_mutex_unlock(&shared->lock);
    if (!span.thread)
        Py_RETURN_NONE;
    return Py_BuildValue("ddl", span.began_s, span.ended_s, span.thread);
}

PyDoc_STRVAR(close_doc,
"close(timeout_s: float) -> bool\n--\n\n"
"Begin no more tasks, and wait for those that run; False when that takes longer: they still use their memory.");

static PyObject *queue_close(Queue *self, PyObject *timeout)
{
    Shared *shared = self->shared;
    double timeout_s = PyFloat_AsDouble(timeout);
    if (PyErr_Occurred() || check(shared))
        return NULL;
    struct timespec until = deadline(timeout_s);
    int ended;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&shared->lock);
    shared->stopped = 1;
    pthread_cond_broadcast(&shared->work);
    pthread_cond_broadcast(&shared->help);
    pthread_cond_broadcast(&shared->done);
    while (shared->owners > 1 && pthread_cond_timedwait(&shared->gone, &shared->lock, &until) != ETIMEDOUT)
        ;
    ended = shared->owners == 1;
    pthread_mutex_unlock(&shared->lock);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(ended);
}

static PyMethodDef queue_methods[] = {
    {"submit", (PyCFunction)(void (*)(void))queue_submit, METH_FASTCALL, submit_doc},
    {"wait", (PyCFunction)(void (*)(void))queue_wait, METH_FASTCALL, wait_doc},
    {"completed", (PyCFunction)queue_completed, METH_NOARGS, completed_doc},
    {"submitted", (PyCFunction)queue_submitted, METH_NOARGS, submitted_doc},
    {"span", (PyCFunction)queue_span, METH_O, span_doc},
    {"close", (PyCFunction)queue_close, METH_O, close_doc},
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(queue_doc,
"Queue(threads: int = 1)\n--\n\n"
"Tasks that are gathered in order, by one thread, and by up to `threads` while a thread waits. Thread-safe; of one\n"
"process. What is submitted is trusted: wrong addresses end the process.");

static PyType_Slot queue_slots[] = {
    {Py_tp_new, queue_new},
    {Py_tp_dealloc, queue_dealloc},
    {Py_tp_methods, queue_methods},
    {Py_tp_doc, (void *)queue_doc},
    {0, NULL},
};

static PyType_Spec queue_spec = {
    .name = "cachestream.training.batches._gather.Queue",
    .basicsize = sizeof(Queue),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = queue_slots,
};

static PyObject *at_exit(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    const struct timespec moment = {0, 1000000};
    Py_BEGIN_ALLOW_THREADS
    atomic_store(&exiting, 1);
    for (int i = 0; atomic_load(&running) && i < EXIT_S * 1000; i++)
        nanosleep(&moment, NULL);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static void forget_running(void) /* in a forked child, which has none of the threads */
{
    atomic_store(&running, 0);
}

static PyMethodDef at_exit_method = {"at_exit", at_exit, METH_NOARGS, "Begin no more tasks, and wait for those that run."};

static int prepare_exit(void)
{
    if (pthread_atfork(NULL, NULL, forget_running)) {
        PyErr_NoMemory();
        return -1;
    }
    PyObject *function = PyCFunction_New(&at_exit_method, NULL);
    PyObject *atexit = PyImport_ImportModule("atexit");
    PyObject *registered = function && atexit ? PyObject_CallMethod(atexit, "register", "O", function) : NULL;
    int failed = registered ? 0 : -1;
    Py_XDECREF(function);
    Py_XDECREF(atexit);
    Py_XDECREF(registered);
    return failed;
}

PyDoc_STRVAR(gather_doc,
"gather(shards: int, rows: int, count: int, columns: tuple[int, ...], outs: tuple[int, ...], non_temporal: bool) -> None\n--\n\n"
"Gather `count` samples now, in this thread and without the GIL: see Queue.submit.");

static PyObject *gather(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t num_args)
{
    Task *task = make_task(args, num_args);
    if (!task)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    run(task);
    Py_END_ALLOW_THREADS
    free(task);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(copy_runs_doc,
"copy_runs(sources: int, lengths: int, targets: int, count: int) -> None\n--\n\n"
"Copy `count` runs of bytes now, in this thread and without the GIL. The first three arguments are the addresses of\n"
"int64 [count]: where each run begins, its bytes, and where it goes.");

static PyObject *copy_runs(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 4) {
        PyErr_SetString(PyExc_TypeError, "copy_runs() takes sources, lengths, targets and count");
        return NULL;
    }
    const int64_t *sources = (const int64_t *)(intptr_t)PyLong_AsLongLong(args[0]);
    const int64_t *lengths = (const int64_t *)(intptr_t)PyLong_AsLongLong(args[1]);
    const int64_t *targets = (const int64_t *)(intptr_t)PyLong_AsLongLong(args[2]);
    int64_t count = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred())
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t i = 0; i < count; i++) {
        if (i + ROWS_AHEAD < count) {
            int64_t next = lengths[i + ROWS_AHEAD];
            prefetch((const char *)sources[i + ROWS_AHEAD], next < START_BYTES ? next : START_BYTES);
        }
        memcpy((char *)targets[i], (const char *)sources[i], (size_t)lengths[i]);
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"gather", (PyCFunction)(void (*)(void))gather, METH_FASTCALL, gather_doc},
    {"copy_runs", (PyCFunction)(void (*)(void))copy_runs, METH_FASTCALL, copy_runs_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_gather",
    .m_doc = "Gathers rows into batches in threads of its own, which never touch the interpreter.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__gather(void)
{
    PyObject *made = PyModule_Create(&module);
    if (!made)
        return NULL;
    PyObject *type = PyType_FromSpec(&queue_spec);
    if (!type || prepare_exit() || PyModule_AddObject(made, "Queue", type)) {
        Py_XDECREF(type);
        Py_DECREF(made);
        return NULL;
    }
    return made;
}

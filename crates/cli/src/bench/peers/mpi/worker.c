/* A rank of MPI that takes the orders of `tensorwire bench`; see order.rs and pattern.rs for the protocol.
 * Its argument is the folder with the pipes of all ranks: a rank that waits for an order must not spin. */
#include <mpi.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { PERIOD = 1021, REPEATS = 64 };

static int rank, world;
static FILE *answers;

struct type {
    const char *name;
    size_t size;
    MPI_Datatype mpi; /* MPI_DATATYPE_NULL: bytes can be moved, but not combined */
};

struct job {
    char op[32], reduce[16];
    const struct type *type;
    size_t bytes, part; /* part in bytes */
    char *input, *output;
    size_t input_len, output_len;
    char *plain, *sum; /* REPEATS + 1 periods */
};

static void say(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vfprintf(answers, format, args);
    va_end(args);
    fputc('\n', answers);
    fflush(answers);
}

static void *memory(size_t len) {
    void *found = NULL;
    if (posix_memalign(&found, 64, len ? len : 1) != 0) {
        fprintf(stderr, "no memory for %zu bytes\n", len);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    memset(found, 0, len ? len : 1);
    return found;
}

static unsigned value(unsigned index) { return 1u << ((uint32_t)(index * 2654435761u) >> 16) % 3; }

static size_t phase(size_t of, size_t iteration) { return 3 * of + 5 * iteration; }

static int is(const struct job *job, const char *op) { return strcmp(job->op, op) == 0; }

static void encode(const struct type *type, unsigned value, char *to) {
    unsigned exponent = value == 4 ? 2 : value - 1;
    float single = (float)value;
    double wide = value;
    uint16_t half = (uint16_t)(0x3c00 + (exponent << 10));
    memset(to, 0, type->size);
    if (!strcmp(type->name, "bool")) to[0] = value & 1;
    else if (!strcmp(type->name, "float16")) memcpy(to, &half, 2);
    else if (!strcmp(type->name, "bfloat16")) memcpy(to, (char *)&single + 2, 2);
    else if (!strcmp(type->name, "float32")) memcpy(to, &single, 4);
    else if (!strcmp(type->name, "float64")) memcpy(to, &wide, 8);
    else if (!strcmp(type->name, "float8_e4m3fn")) to[0] = (char)(0x38 + (exponent << 3));
    else if (!strcmp(type->name, "float8_e5m2")) to[0] = (char)(0x3c + (exponent << 2));
    else if (!strcmp(type->name, "float8_e4m3fnuz")) to[0] = (char)(0x40 + (exponent << 3));
    else if (!strcmp(type->name, "float8_e5m2fnuz")) to[0] = (char)(0x40 + (exponent << 2));
    else if (!strcmp(type->name, "float8_e8m0fnu")) to[0] = (char)(0x7f + exponent);
    else if (!strcmp(type->name, "complex32")) memcpy(to, &half, 2), memcpy(to + 2, &half, 2);
    else if (!strcmp(type->name, "complex64")) memcpy(to, &single, 4), memcpy(to + 4, &single, 4);
    else if (!strcmp(type->name, "complex128")) memcpy(to, &wide, 8), memcpy(to + 8, &wide, 8);
    else to[0] = (char)value;
}

static char *tile(const char *period, size_t element) {
    size_t len = PERIOD * element;
    char *all = memory(len * (REPEATS + 1));
    for (int copy = 0; copy <= REPEATS; copy++) memcpy(all + copy * len, period, len);
    return all;
}

static void put(const struct job *job, const char *from, char *to, size_t len, size_t at) {
    size_t element = job->type->size, piece = PERIOD * REPEATS * element;
    from += at % PERIOD * element;
    for (size_t offset = 0; offset < len; offset += piece)
        memcpy(to + offset, from, len - offset < piece ? len - offset : piece);
}

static size_t differ(const struct job *job, const char *from, const char *seen, size_t len, size_t at) {
    size_t element = job->type->size, piece = PERIOD * REPEATS * element, wrong = 0;
    from += at % PERIOD * element;
    for (size_t offset = 0; offset < len; offset += piece) {
        size_t now = len - offset < piece ? len - offset : piece;
        if (memcmp(seen + offset, from, now) == 0) continue;
        for (size_t i = 0; i < now; i += element) wrong += memcmp(seen + offset + i, from + i, element) != 0;
    }
    return wrong;
}

static MPI_Op mpi_op(const char *name) {
    static const struct { const char *name; int which; } names[] = {
        {"SUM", 0}, {"PRODUCT", 1}, {"MIN", 2}, {"MAX", 3}, {"BAND", 4}, {"BOR", 5}, {"BXOR", 6}};
    const MPI_Op ops[] = {MPI_SUM, MPI_PROD, MPI_MIN, MPI_MAX, MPI_BAND, MPI_BOR, MPI_BXOR};
    const MPI_Op logical[] = {MPI_LOR, MPI_LAND, MPI_LAND, MPI_LOR, MPI_LAND, MPI_LOR, MPI_LXOR};
    int of_bools = name[0] == '?';
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!strcmp(names[i].name, name + of_bools)) return (of_bools ? logical : ops)[names[i].which];
    return MPI_OP_NULL;
}

static MPI_Op op_of(const struct job *job) {
    char name[20];
    snprintf(name, sizeof name, "%s%s", strcmp(job->type->name, "bool") ? "" : "?", job->reduce);
    return mpi_op(name);
}

static int reduces(const struct job *job) {
    return is(job, "all-reduce") || is(job, "reduce") || is(job, "reduce-scatter");
}

static void drop(struct job *job) {
    free(job->input), free(job->output), free(job->plain), free(job->sum);
    memset(job, 0, sizeof *job);
}

static void prepare_job(struct job *job) {
    size_t element = job->type->size;
    int root = rank == 0;
    char *period = memory(PERIOD * element);
    for (unsigned i = 0; i < PERIOD; i++) encode(job->type, value(i), period + i * element);
    job->plain = tile(period, element);
    if (reduces(job)) {
        /* MPI's own functions, in rank order: result = result op next. */
        char *next = memory(PERIOD * element);
        memcpy(period, job->plain, PERIOD * element);
        for (int other = 1; other < world; other++) {
            memcpy(next, job->plain + phase((size_t)other, 0) % PERIOD * element, PERIOD * element);
            MPI_Reduce_local(period, next, PERIOD, job->type->mpi, op_of(job));
            memcpy(period, next, PERIOD * element);
        }
        job->sum = tile(period, element);
        free(next);
    }
    free(period);
    job->part = job->bytes / (size_t)world;
    job->input_len = job->bytes;
    if (is(job, "all-gather") || is(job, "gather")) job->input_len = job->part;
    if (is(job, "scatter")) job->input_len = root ? job->bytes : 0;
    if (is(job, "all-gather") || is(job, "all-to-all")) job->output_len = job->bytes;
    if (is(job, "gather")) job->output_len = root ? job->bytes : 0;
    if (is(job, "scatter") || is(job, "reduce-scatter")) job->output_len = job->part;
    job->input = memory(job->input_len);
    job->output = memory(job->output_len);
}

static void prepare(const struct job *job, size_t iteration) {
    if (is(job, "scatter")) {
        for (int other = 0; rank == 0 && other < world; other++)
            put(job, job->plain, job->input + other * job->part, job->part, phase((size_t)other, iteration));
    } else {
        put(job, job->plain, job->input, job->input_len, phase((size_t)rank, iteration));
    }
}

static void call(const struct job *job, MPI_Datatype type, MPI_Op op) {
    MPI_Comm all = MPI_COMM_WORLD;
    size_t unit = type == MPI_BYTE ? 1 : job->type->size;
    int count = (int)(job->bytes / unit), part = (int)(job->part / unit);
    if (is(job, "all-reduce")) MPI_Allreduce(MPI_IN_PLACE, job->input, count, type, op, all);
    else if (is(job, "reduce"))
        MPI_Reduce(rank ? job->input : MPI_IN_PLACE, job->input, count, type, op, 0, all);
    else if (is(job, "broadcast")) MPI_Bcast(job->input, count, type, 0, all);
    else if (is(job, "all-gather")) MPI_Allgather(job->input, part, type, job->output, part, type, all);
    else if (is(job, "gather")) MPI_Gather(job->input, part, type, job->output, part, type, 0, all);
    else if (is(job, "scatter")) MPI_Scatter(job->input, part, type, job->output, part, type, 0, all);
    else if (is(job, "reduce-scatter")) MPI_Reduce_scatter_block(job->input, job->output, part, type, op, all);
    else if (is(job, "all-to-all")) MPI_Alltoall(job->input, part, type, job->output, part, type, all);
    else if (is(job, "send-recv")) {
        if (rank % 2) MPI_Recv(job->input, count, type, rank - 1, 7, all, MPI_STATUS_IGNORE);
        else if (rank + 1 < world) MPI_Send(job->input, count, type, rank + 1, 7, all);
    } else if (is(job, "barrier")) MPI_Barrier(all);
}

static size_t check(const struct job *job, size_t iteration) {
    size_t element = job->type->size, wrong = 0;
    size_t mine = (size_t)rank * job->part / element;
    if (is(job, "all-reduce") || (is(job, "reduce") && rank == 0))
        return differ(job, job->sum, job->input, job->bytes, phase(0, iteration));
    if (is(job, "reduce")) return differ(job, job->plain, job->input, job->bytes, phase((size_t)rank, iteration));
    if (is(job, "broadcast")) return differ(job, job->plain, job->input, job->bytes, phase(0, iteration));
    if (is(job, "all-gather") || (is(job, "gather") && rank == 0) || is(job, "all-to-all")) {
        size_t from = is(job, "all-to-all") ? mine : 0;
        for (int other = 0; other < world; other++)
            wrong += differ(job, job->plain, job->output + other * job->part, job->part,
                            phase((size_t)other, iteration) + from);
        return wrong;
    }
    if (is(job, "scatter"))
        return differ(job, job->plain, job->output, job->part, phase((size_t)rank, iteration));
    if (is(job, "reduce-scatter"))
        return differ(job, job->sum, job->output, job->part, phase(0, iteration) + mine);
    if (is(job, "send-recv") && rank % 2)
        return differ(job, job->plain, job->input, job->bytes, phase((size_t)rank - 1, iteration));
    return 0;
}

static void carry_out(const struct job *job, size_t warmup, size_t iterations, size_t first) {
    MPI_Datatype type = job->type->mpi == MPI_DATATYPE_NULL ? MPI_BYTE : job->type->mpi;
    MPI_Op op = op_of(job);
    uint64_t *times = memory(sizeof(uint64_t) * (warmup + iterations));
    size_t wrong = 0;
    for (size_t i = 0; i < warmup + iterations; i++) {
        struct timespec start, end;
        prepare(job, first + i);
        MPI_Barrier(MPI_COMM_WORLD);
        clock_gettime(CLOCK_MONOTONIC, &start);
        call(job, type, op);
        clock_gettime(CLOCK_MONOTONIC, &end);
        times[i] = (uint64_t)(end.tv_sec - start.tv_sec) * 1000000000u + (uint64_t)end.tv_nsec - (uint64_t)start.tv_nsec;
        wrong += check(job, first + i);
    }
    fprintf(answers, "ok %zu default", wrong);
    for (size_t i = warmup; i < warmup + iterations; i++) fprintf(answers, " %llu", (unsigned long long)times[i]);
    fputc('\n', answers);
    fflush(answers);
    free(times);
}

/* Whether the job is possible; says why not otherwise. */
static int possible(const struct job *job) {
    if (!job->type) return say("no MPI program knows the type"), 0;
    if (job->bytes / job->type->size > 0x7fffffff) return say("no MPI counts at most 2^31 - 1 elements"), 0;
    if (!reduces(job)) return 1;
    if (job->type->mpi == MPI_DATATYPE_NULL) return say("no MPI has no reduction of %s", job->type->name), 0;
    if (op_of(job) == MPI_OP_NULL) return say("no MPI has no reduction %s", job->reduce), 0;
    return 1;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    const struct type types[] = {
        {"bool", 1, MPI_C_BOOL}, {"int8", 1, MPI_INT8_T}, {"int16", 2, MPI_INT16_T}, {"int32", 4, MPI_INT32_T},
        {"int64", 8, MPI_INT64_T}, {"uint8", 1, MPI_UINT8_T}, {"uint16", 2, MPI_UINT16_T},
        {"uint32", 4, MPI_UINT32_T}, {"uint64", 8, MPI_UINT64_T}, {"float16", 2, MPI_DATATYPE_NULL},
        {"bfloat16", 2, MPI_DATATYPE_NULL}, {"float32", 4, MPI_FLOAT}, {"float64", 8, MPI_DOUBLE},
        {"float8_e4m3fn", 1, MPI_DATATYPE_NULL}, {"float8_e5m2", 1, MPI_DATATYPE_NULL},
        {"complex64", 8, MPI_C_FLOAT_COMPLEX}, {"complex128", 16, MPI_C_DOUBLE_COMPLEX},
        {"float8_e4m3fnuz", 1, MPI_DATATYPE_NULL}, {"float8_e5m2fnuz", 1, MPI_DATATYPE_NULL},
        {"float8_e8m0fnu", 1, MPI_DATATYPE_NULL}, {"complex32", 4, MPI_DATATYPE_NULL}};
    char path[4096], line[512], version[MPI_MAX_LIBRARY_VERSION_STRING];
    int len;
    snprintf(path, sizeof path, "%s/orders-%d", argc > 1 ? argv[1] : ".", rank);
    FILE *orders = fopen(path, "r");
    snprintf(path, sizeof path, "%s/answers-%d", argc > 1 ? argv[1] : ".", rank);
    answers = fopen(path, "w");
    if (!orders || !answers) return perror(path), MPI_Abort(MPI_COMM_WORLD, 1), 1;
    MPI_Get_library_version(version, &len);
    version[strcspn(version, ",\n")] = 0;
    MPI_Barrier(MPI_COMM_WORLD);
    say("ready %d %s", (int)getpid(), version);
    struct job job;
    memset(&job, 0, sizeof job);
    char kept[512] = "";
    while (fgets(line, sizeof line, orders)) {
        char op[32], type[32], reduce[16], space[16], way[16], wanted[512];
        size_t bytes, warmup, iterations, first;
        if (sscanf(line, "%31s %zu %31s %15s %15s %15s %zu %zu %zu", op, &bytes, type, reduce, space, way, &warmup,
                   &iterations, &first) != 9) {
            say("no order of nine words");
            continue;
        }
        snprintf(wanted, sizeof wanted, "%s %zu %s %s", op, bytes, type, reduce);
        if (strcmp(kept, wanted)) {
            drop(&job);
            kept[0] = 0;
            strcpy(job.op, op), strcpy(job.reduce, reduce);
            job.bytes = bytes;
            for (size_t i = 0; i < sizeof types / sizeof *types; i++)
                if (!strcmp(types[i].name, type)) job.type = &types[i];
            if (!possible(&job)) continue;
            prepare_job(&job);
            strcpy(kept, wanted);
        }
        carry_out(&job, warmup, iterations, first);
    }
    MPI_Finalize();
    return 0;
}

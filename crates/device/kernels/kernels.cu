// Every kernel by name. scripts/kernels compiles this file; src/cuda/kernels knows the names.
#include "copy.cuh"
#include "rows.cuh"

#define REDUCE(op, Op, type, T) \
    KERNEL(reduce_##op##_##type, ReduceArguments) { reduce<T, Op>(arguments); } \
    KERNEL(together_##op##_##type, TogetherArguments) { together<T, Op>(arguments); } \
    KERNEL(rows_##op##_##type, RowsArguments) { reduce_rows<T, Op>(arguments); }
#define STRIDED(size, Memory) \
    KERNEL(copy_strided_##size, StridedArguments) { copy_strided<Memory>(arguments); }

#define ORDERED(type, T) \
    REDUCE(min, Min, type, T) \
    REDUCE(max, Max, type, T)
#define NUMBERS(type, T) \
    REDUCE(sum, Sum, type, T) \
    REDUCE(product, Product, type, T)
#define BITWISE(type, T) \
    REDUCE(and, And, type, T) \
    REDUCE(or, Or, type, T) \
    REDUCE(xor, Xor, type, T)
#define FLOAT(type, T) \
    NUMBERS(type, T) \
    ORDERED(type, T) \
    REDUCE(avg, Avg, type, T) \
    REDUCE(premul_sum, PremulSum, type, T)

// Signed and unsigned integers have the same sums and products.
NUMBERS(u8, U8)
NUMBERS(u16, U16)
NUMBERS(u32, U32)
NUMBERS(u64, U64)
ORDERED(i8, I8)
ORDERED(i16, I16)
ORDERED(i32, I32)
ORDERED(i64, I64)
ORDERED(u8, U8)
ORDERED(u16, U16)
ORDERED(u32, U32)
ORDERED(u64, U64)
BITWISE(raw, Raw)
BITWISE(bool, Bool)
FLOAT(f16, F16)
FLOAT(bf16, Bf16)
FLOAT(f32, F32)
FLOAT(f64, F64)
FLOAT(f8e4m3fn, F8E4M3Fn)
FLOAT(f8e5m2, F8E5M2)
FLOAT(f8e4m3fnuz, F8E4M3Fnuz)
FLOAT(f8e5m2fnuz, F8E5M2Fnuz)
FLOAT(f8e8m0fnu, F8E8M0Fnu)
// Other operations on complex numbers are those on twice as many real ones.
REDUCE(product, Product, complex32, Complex32)
REDUCE(product, Product, complex64, Complex64)
REDUCE(product, Product, complex128, Complex128)

KERNEL(copy, CopyArguments) { copy_all(arguments); }
// Nothing but a meeting.
KERNEL(meet, MeetingArguments) {
    Meeting meeting(arguments);
    if (meeting.held()) meeting.end();
}
STRIDED(1, u8)
STRIDED(2, u16)
STRIDED(4, u32)
STRIDED(8, u64)
STRIDED(16, Pack)

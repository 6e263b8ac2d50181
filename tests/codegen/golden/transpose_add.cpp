extern "C" void kernel(void**P, const i64*ints) {
    const float*p0 = (float*)P[0];
    const float*p1 = (float*)P[1];
    float*p2 = (float*)P[2];
    for (i64 task = 0; task<24; task++) {
        const i64 o0 = task/3;
        const i64 o1 = (task)%3;
        {
            i64 n0 = 0;
            for (; n0+8<=16; n0 += 8) {
                const F8 v1 = ld<F8>(p0+16l*o1+48l*o0+n0);
                const F8 v2 = ld<F8>(p1+128l*o1+16l*o0+n0);
                const F8 v3 = v1+v2;
                st<float>(p2+16l*o1+48l*o0+n0, v3);
            }
        }
    }
}

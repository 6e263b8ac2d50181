extern "C" void kernel(void**P, const i64*ints) {
    const float*p0 = (float*)P[0];
    const float*p1 = (float*)P[1];
    u8*p2 = (u8*)P[2];
    {
        const i64 task = 0;
        {
            i64 n0 = 0;
            for (; n0+8<=50; n0 += 8) {
                const F8 v1 = ld<F8>(p0+n0);
                const I8 v2 = gt(v1, bc<F8>(0.0f));
                const F8 v3 = ld<F8>(p1+n0);
                const F8 v4 = round_bf(v3);
                const I8 v5 = lt(v4, v1);
                const I8 v6 = v2&v5;
                stb(p2+n0, v6);
            }
            for (; n0<50; n0++) {
                const float v7 = ld<float>(p0+n0);
                const int v8 = gt(v7, 0.0f);
                const float v9 = ld<float>(p1+n0);
                const float v10 = round_bf(v9);
                const int v11 = lt(v10, v7);
                const int v12 = v8&v11;
                stb(p2+n0, (int)v12);
            }
        }
    }
}

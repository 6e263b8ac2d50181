extern "C" void kernel(void**P, const i64*ints) {
    const float*p0 = (float*)P[0];
    const float*p1 = (float*)P[1];
    float*p2 = (float*)P[2];
    for (i64 task = 0; task<5; task++) {
        const i64 o0 = task;
        F8 a0_0 = bc<F8>(0.0f);
        {
            i64 n0 = 0;
            for (; n0+8<=32; n0 += 8) {
                const F8 v1 = ld<F8>(p0+32l*o0+n0);
                a0_0 = a0_0+v1;
            }
        }
        const float v2 = hsum(a0_0);
        F8 a1_0 = bc<F8>(0.0f);
        F8 a2_0 = bc<F8>(0.0f);
        const float v4 = v2/32.0f;
        {
            i64 n0 = 0;
            for (; n0+8<=32; n0 += 8) {
                const F8 v3 = ld<F8>(p0+32l*o0+n0);
                const F8 v5 = v3-bc<F8>(v4);
                const F8 v6 = v5*v5;
                a1_0 = a1_0+v6;
                a2_0 = a2_0+v5;
            }
        }
        const float v7 = hsum(a1_0);
        const float v8 = hsum(a2_0);
        const int v11 = lt(v7, (__builtin_inff()));
        const float v12 = v8/32.0f;
        const float v13 = v12*v8;
        const float v14 = v7-rounded_(v13);
        const int v15 = lt(v14, 0.0f);
        const float v16 = sel(v15, 0.0f, v14);
        const float v17 = sel(v11, v16, v7);
        const float v18 = v17/32.0f;
        const float v19 = v18+9.999999747378752e-06f;
        const float v20 = rsqrt_(v19);
        {
            i64 n0 = 0;
            for (; n0+8<=32; n0 += 8) {
                const F8 v9 = ld<F8>(p0+32l*o0+n0);
                const F8 v10 = v9-bc<F8>(v4);
                const F8 v21 = v10*bc<F8>(v20);
                const F8 v22 = ld<F8>(p1+n0);
                const F8 v23 = v21*v22;
                st<float>(p2+32l*o0+n0, v23);
            }
        }
    }
}

extern "C" void kernel(void**P, const i64*ints) {
    const float*p0 = (float*)P[0];
    const float*p1 = (float*)P[1];
    float*p2 = (float*)P[2];
    for (i64 task = 0; task<5; task++) {
        const i64 o0 = task;
        float a0s = bc<float>(0.0f);
        F8 a0_0 = bc<F8>(0.0f);
        {
            i64 n0 = 0;
            for (; n0+8<=32; n0 += 8) {
                const F8 v1 = ld<F8>(p0+32l*o0+n0);
                a0_0 = a0_0+v1;
            }
        }
        const float v2 = a0s+hsum(a0_0);
        float a1s = bc<float>(0.0f);
        F8 a1_0 = bc<F8>(0.0f);
        float a2s = bc<float>(0.0f);
        F8 a2_0 = bc<F8>(0.0f);
        const float v4 = v2/32.0f;
        {
            i64 n0 = 0;
            for (; n0+8<=32; n0 += 8) {
                const F8 v3 = ld<F8>(p0+32l*o0+n0);
                const F8 v5 = v3-bc<F8>(v4);
                a1_0 = a1_0+v5*v5;
                a2_0 = a2_0+v5;
            }
        }
        const float v6 = a1s+hsum(a1_0);
        const float v7 = a2s+hsum(a2_0);
        const int v10 = lt(v6, (__builtin_inff()));
        const float v11 = v7/32.0f;
        const float v12 = mul_(v11, v7);
        const float v13 = v6-v12;
        const int v14 = lt(v13, 0.0f);
        const float v15 = sel(v14, 0.0f, v13);
        const float v16 = sel(v10, v15, v6);
        const float v17 = v16/32.0f;
        const float v18 = v17+9.999999747378752e-06f;
        const float v19 = rsqrt_(v18);
        {
            i64 n0 = 0;
            for (; n0+8<=32; n0 += 8) {
                const F8 v8 = ld<F8>(p0+32l*o0+n0);
                const F8 v9 = v8-bc<F8>(v4);
                const F8 v20 = mul_(v9, bc<F8>(v19));
                const F8 v21 = ld<F8>(p1+n0);
                const F8 v22 = mul_(v20, v21);
                st<float>(p2+32l*o0+n0, v22);
            }
        }
    }
}

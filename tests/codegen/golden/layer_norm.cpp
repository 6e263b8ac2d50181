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
        const float v4 = v2/32.0f;
        {
            i64 n0 = 0;
            for (; n0+8<=32; n0 += 8) {
                const F8 v3 = ld<F8>(p0+32l*o0+n0);
                const F8 v5 = v3-bc<F8>(v4);
                const F8 v6 = v5*v5;
                a1_0 = a1_0+v6;
            }
        }
        const float v7 = a1s+hsum(a1_0);
        const float v10 = v7/32.0f;
        const float v11 = v10+9.999999747378752e-06f;
        const float v12 = rsqrt_(v11);
        {
            i64 n0 = 0;
            for (; n0+8<=32; n0 += 8) {
                const F8 v8 = ld<F8>(p0+32l*o0+n0);
                const F8 v9 = v8-bc<F8>(v4);
                const F8 v13 = v9*bc<F8>(v12);
                const F8 v14 = ld<F8>(p1+n0);
                const F8 v15 = v13*v14;
                st<float>(p2+32l*o0+n0, v15);
            }
        }
    }
}

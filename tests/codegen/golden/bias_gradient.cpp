extern "C" void kernel(void**P, const i64*ints) {
    const float*p0 = (float*)P[0];
    float*p1 = (float*)P[1];
    for (i64 task = 0; task<2; task++) {
        const i64 block = task%2;
        F8 a0_0 = bc<F8>(0.0f);
        F8 a0_0k = {}, a0_0l = {};
        F8 a0_1 = bc<F8>(0.0f);
        F8 a0_1k = {}, a0_1l = {};
        F8 a0_2 = bc<F8>(0.0f);
        F8 a0_2k = {}, a0_2l = {};
        const i64 n0_0 = block*24+0;
        const i64 n0_1 = block*24+8;
        const i64 n0_2 = block*24+16;
        {
            i64 m0 = 0;
            for (; m0<64;) {
                for (const i64 stop_ = m0+32<64?m0+32:64; m0<stop_; m0++) {
                    {
                        const F8 v1 = ld<F8>(p0+48l*m0+n0_0);
                        a0_0 = a0_0+v1;
                    }
                    {
                        const F8 v2 = ld<F8>(p0+48l*m0+n0_1);
                        a0_1 = a0_1+v2;
                    }
                    {
                        const F8 v3 = ld<F8>(p0+48l*m0+n0_2);
                        a0_2 = a0_2+v3;
                    }
                }
                keep(a0_0k, a0_0l, a0_0);
                keep(a0_1k, a0_1l, a0_1);
                keep(a0_2k, a0_2l, a0_2);
            }
        }
        keep(a0_0k, a0_0l, a0_0);
        keep(a0_1k, a0_1l, a0_1);
        keep(a0_2k, a0_2l, a0_2);
        a0_0 = a0_0k;
        a0_1 = a0_1k;
        a0_2 = a0_2k;
        {
            st<float>(p1+n0_0, a0_0);
        }
        {
            st<float>(p1+n0_1, a0_1);
        }
        {
            st<float>(p1+n0_2, a0_2);
        }
    }
}

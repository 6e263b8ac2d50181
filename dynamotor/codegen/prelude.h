// The C++ text that every translation unit starts with; cpp_prelude.py takes the sections that a unit needs.
//
// No headers. `F16` is 16 floats, `I16` 16 ints (also masks: 0 or -1), `L8` 8 longs, `D8` 8 doubles; `tr` has
// for each the integers of its size (I), its element (E) and 32-bit integers, floats and doubles of as many lanes (J, G, W). Each
// function works on a scalar and on a vector alike, so that one text serves the vector loop and its tail.

// == types: what every file has
// With instructions for halves of its own, GCC 12 takes a vector's way to half and back for no
// rounding at all.
#ifdef __AVX512FP16__
#pragma GCC target("no-avx512fp16")
#endif
#define INL static inline __attribute__((always_inline))
typedef long i64; typedef unsigned u32; typedef unsigned long u64; typedef unsigned char u8;
typedef signed char i8; typedef short i16;
typedef unsigned short bf16;
#ifdef __aarch64__
typedef __fp16 f16; // GCC 12 has no _Float16 in C++ there; all arithmetic is in float
#else
typedef _Float16 f16;
#endif
extern "C" { void* realloc(void*, unsigned long) noexcept; }
template<class T> struct tr;
template<> struct tr<float>{typedef int I; typedef float E; enum{n=1,wide=0};};
template<> struct tr<double>{typedef i64 I; typedef double E; enum{n=1,wide=1};};
template<> struct tr<int>{typedef int I; typedef int E; enum{n=1,wide=0};};
template<> struct tr<i64>{typedef i64 I; typedef i64 E; enum{n=1,wide=1};};

// == width: vectors of @ lanes
typedef float F@ __attribute__((vector_size(@*4))); typedef int I@ __attribute__((vector_size(@*4)));
typedef u32 U@ __attribute__((vector_size(@*4)));
typedef double D@ __attribute__((vector_size(@*8))); typedef i64 L@ __attribute__((vector_size(@*8)));
template<> struct tr<F@>{typedef I@ I; typedef float E; typedef I@ J; typedef F@ G; typedef D@ W; enum{n=@,wide=0};};
template<> struct tr<D@>{typedef L@ I; typedef double E; typedef I@ J; typedef F@ G; typedef D@ W; enum{n=@,wide=1};};
template<> struct tr<I@>{typedef I@ I; typedef int E; typedef I@ J; typedef F@ G; typedef D@ W; enum{n=@,wide=0};};
template<> struct tr<L@>{typedef L@ I; typedef i64 E; typedef I@ J; typedef F@ G; typedef D@ W; enum{n=@,wide=1};};
INL I@ narrow(L@ m){return __builtin_convertvector(m,I@);} INL I@ narrow(I@ m){return m;}
INL L@ widen(I@ m){return __builtin_convertvector(m,L@);}
INL F@ sel(I@ m,F@ a,F@ b){return m?a:b;} INL I@ sel(I@ m,I@ a,I@ b){return m?a:b;}
INL D@ sel(I@ m,D@ a,D@ b){return widen(m)?a:b;} INL L@ sel(I@ m,L@ a,L@ b){return widen(m)?a:b;}

// == narrow: vectors of @ elements of 8 bits (B unsigned, C signed) and of 16 (H, also halves as they are)
typedef u8 B@ __attribute__((vector_size(@))); typedef i8 C@ __attribute__((vector_size(@)));
typedef i16 H@ __attribute__((vector_size(@*2)));
template<> struct tr<B@>{typedef B@ I; typedef u8 E; enum{n=@,wide=0};};
template<> struct tr<C@>{typedef C@ I; typedef i8 E; enum{n=@,wide=0};};
template<> struct tr<H@>{typedef H@ I; typedef i16 E; enum{n=@,wide=0};};
INL B@ narrow(B@ m){return m;} INL C@ narrow(C@ m){return m;} INL H@ narrow(H@ m){return m;}
INL B@ lt(B@ a,B@ b){return (B@)(a<b);} INL B@ le(B@ a,B@ b){return (B@)(a<=b);}
INL B@ gt(B@ a,B@ b){return (B@)(a>b);} INL B@ ge(B@ a,B@ b){return (B@)(a>=b);}
INL B@ eq(B@ a,B@ b){return (B@)(a==b);} INL B@ ne(B@ a,B@ b){return (B@)(a!=b);}
INL B@ sel(B@ m,B@ a,B@ b){return m?a:b;} INL C@ sel(C@ m,C@ a,C@ b){return m?a:b;}
INL H@ sel(H@ m,H@ a,H@ b){return m?a:b;}

// == core: loads, stores, choices, reductions
INL int narrow(int m){return m;} INL int narrow(bool m){return -(int)m;}
INL float sel(int m,float a,float b){return m?a:b;} INL int sel(int m,int a,int b){return m?a:b;}
INL double sel(int m,double a,double b){return m?a:b;} INL i64 sel(int m,i64 a,i64 b){return m?a:b;}
template<class T> INL T bc(typename tr<T>::E x){ if constexpr(tr<T>::n==1) return x; else return x-(T){}; }
template<class T,class A> INL T cvt(A x){ if constexpr(tr<T>::n==1) return (T)x;
 else return __builtin_convertvector(x,T); }
// A product is rounded before anything is added to it, as eager rounds it. Left to itself, a compiler rounds `a*b+c`
// once where nothing else reads `a*b` and twice elsewhere: a maximum was not found among the sums that it was the maximum
// of, since the second loop over a row rounded them otherwise. (Contraction stays on: the functions below need it.)
#ifdef __AVX512F__
#define REGISTER 64
#elif defined(__AVX__)
#define REGISTER 32
#else
#define REGISTER 16
#endif
// A whole number has no -0: GCC (12 does) takes (float)(int)x for a truncation of x where traps do not
// matter, unless it cannot see both. (Its own barrier takes vectors apart.)
#if defined(__clang__)
#define UNSEEN(x) (x)
#else
#if defined(__x86_64__)
#define ANYWHERE "+v"
#elif defined(__aarch64__)
#define ANYWHERE "+w"
#else
#define ANYWHERE "+m"
#endif
template<class T> INL T UNSEEN(T x){ if constexpr(tr<T>::n==1) asm("":"+r"(x)); else asm("":ANYWHERE(x)); return x; }
#endif
template<class T> INL T rounded_(T r){
#if !defined(__clang__) // which adds to a product of the same expression alone
 if constexpr(sizeof(T)<=REGISTER) asm("":ANYWHERE(r)); else asm("":"+m"(r));
#endif
 return r; }
// Rounded once, whatever else reads the factors, where the processor can; in eager, too.
#if defined(__FMA__)||defined(__aarch64__)
#define FUSED 1
#else
#define FUSED 0
#endif
template<class T> INL T fma_(T a,T b,T c){
#if FUSED
 return a*rounded_(b)+c;
#else
 return rounded_(a*b)+c;
#endif
 }
// A compiler turns a NaN that it knows into another whole number than the processor does.
template<class T,class A> INL T whole(A x){
 if constexpr(tr<T>::n==1) if(__builtin_constant_p(x)) asm("":"+m"(x));
 return UNSEEN(cvt<T>(x)); }
template<class T,class A> INL T bits(A x){ return __builtin_bit_cast(T,x); }
// The bits of a float that a half holds.
template<class M> INL i16 half_bits(float x){ if constexpr(__is_same(M,bf16)) return bits<int>(x)>>16;
 else return bits<i16>((M)x); }
#define CMP(name,o) template<class T> INL auto name(T a,T b){ return narrow(a o b); }
CMP(lt,<) CMP(le,<=) CMP(gt,>) CMP(ge,>=) CMP(eq,==) CMP(ne,!=)
// The processor's maximum is b where either is NaN, or both are zeros. Of integers, GCC finds it.
#if defined(__AVX512F__) && !defined(__clang__)
#define WIDEST(name,a,b) if constexpr(same_vector<T,float,64>) m=(T)__builtin_ia32_##name##ps512_mask(a,b,b,(short)-1,4); \
 else if constexpr(same_vector<T,double,64>) m=(T)__builtin_ia32_##name##pd512_mask(a,b,b,(char)-1,4); else
#else
#define WIDEST(name,a,b)
#endif
#ifdef __AVX__
#define WIDE(name,a,b) if constexpr(same_vector<T,float,32>) m=(T)__builtin_ia32_##name##ps256(a,b); \
 else if constexpr(same_vector<T,double,32>) m=(T)__builtin_ia32_##name##pd256(a,b); else
#else
#define WIDE(name,a,b)
#endif
template<class T,class E,int N> constexpr bool same_vector=__is_same(typename tr<T>::E,E)&&sizeof(T)==N;
#define EXTREME(name,o) template<class T> INL T name##_(T a,T b){ \
 if constexpr(!__is_same(typename tr<T>::E,float)&&!__is_same(typename tr<T>::E,double)) return a o b?a:b; \
 else { T m; WIDEST(name,a,b) WIDE(name,a,b) return (a o b)|(a!=a)?a:b; return a!=a?a:m; } }
EXTREME(max,>) EXTREME(min,<)
template<class T> INL auto lane(T v,int i){ if constexpr(tr<T>::n==1) return v; else return v[i]; }
#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
template<class E,int N> struct halves { typedef E V __attribute__((vector_size(N/2*sizeof(E)))); V x,y; };
#define HALVES(v,N,f) \
 if constexpr(N>16){ const auto h=__builtin_bit_cast(halves<__typeof__(v[0]),N>,v); return f(f##_half(h.x,h.y)); } \
 else if constexpr(N==16){ auto x=__builtin_shufflevector(v,v,0,1,2,3,4,5,6,7), \
 y=__builtin_shufflevector(v,v,8,9,10,11,12,13,14,15); return f(f##_half(x,y)); } \
 else if constexpr(N==8){ auto x=__builtin_shufflevector(v,v,0,1,2,3), \
 y=__builtin_shufflevector(v,v,4,5,6,7); return f(f##_half(x,y)); } \
 else if constexpr(N==4){ auto x=__builtin_shufflevector(v,v,0,1),y=__builtin_shufflevector(v,v,2,3); \
 auto z=f##_half(x,y); return f##_pair(z[0],z[1]); } else
#else
#define HALVES(v,N,f)
#endif
// Reductions over the lanes, by halves. `x_half` joins two vectors and `x_pair` two numbers.
#define ACROSS(name,half,pair) template<class V> INL V name##_half(V x,V y){ return half; } \
 template<class E> INL E name##_pair(E x,E y){ return pair; } \
 template<class T> INL auto name(T v){ enum{N=sizeof(T)/sizeof(v[0])}; HALVES(v,N,name) { auto s=v[0]; \
 for(int i=1;i<N;i++) s=name##_pair(s,v[i]); return s; } } \
 INL float name(float v){ return v; } INL double name(double v){ return v; } \
 INL int name(int v){ return v; } INL i64 name(i64 v){ return v; }
ACROSS(hsum,x+y,x+y) ACROSS(hprod,x*y,x*y) ACROSS(hany,x|y,x|y)
ACROSS(hmost,y>x?y:x,y>x?y:x) ACROSS(hleast,y<x?y:x,y<x?y:x)
template<class T> INL int hor(T v){ int s=lane(v,0); for(int i=1;i<tr<T>::n;i++)s|=lane(v,i); return s; }
template<class T> INL int hand(T v){ int s=lane(v,0); for(int i=1;i<tr<T>::n;i++)s&=lane(v,i); return s; }
// Whether a mask is true in any lane.
template<class T> INL bool some(T m){
#ifdef __AVX512F__
 if constexpr(sizeof(T)==64){ typedef int V __attribute__((vector_size(64)));
 return __builtin_ia32_ptestmd512((V)m,(V)m,(short)-1); } else
#endif
#ifdef __AVX__
 if constexpr(sizeof(T)==32){ typedef long long V __attribute__((vector_size(32)));
 return !__builtin_ia32_ptestz256((V)m,(V)m); } else
#endif
 if constexpr(tr<T>::n==1) return m; else return hany(m); }
// A NaN is looked for apart, at the same time: the extremes of the halves wait for one another.
#define EXTREME_ACROSS(name,of) template<class T> INL auto name(T v){ typedef typename tr<T>::E E; \
 if constexpr(tr<T>::n>1&&(__is_same(E,float)||__is_same(E,double))) \
 if(__builtin_expect(some(v!=v),0)) return (E)__builtin_nanf(""); \
 return of(v); }
EXTREME_ACROSS(hmax,hmost) EXTREME_ACROSS(hmin,hleast)
template<class T,int N> struct mem { typedef T V
 __attribute__((vector_size(N*sizeof(T)),aligned(sizeof(T)),may_alias)); };
template<class T> struct mem<T,1> { typedef T V __attribute__((may_alias)); };
// GCC converts vectors of narrow elements one by one: the processor's own instructions take them from memory into
// 32 bits (`take`), and put the low bits of wider ones there (`put`).
#if defined(__AVX2__) && defined(__F16C__)
#define PACKED 1
#define MOVE(ins) asm(ins " %1,%0":"=v"(r):"m"(*p))
template<class R,class M,class V> INL R take(const V*p){ R r; if constexpr(__is_same(M,i8)) MOVE("vpmovsxbd");
 else if constexpr(__is_same(M,u8)) MOVE("vpmovzxbd"); else if constexpr(__is_same(M,i16)) MOVE("vpmovsxwd");
 else if constexpr(__is_same(M,bf16)) MOVE("vpmovzxwd"); else MOVE("vcvtph2ps"); return r; }
#undef MOVE
#ifdef __AVX512VL__
#define MOVE(ins) asm(ins " %1,%0":"=m"(*p):"v"(x))
template<class M,class T,class V> INL void put(V*p,T x){ if constexpr(tr<T>::wide){
 if constexpr(sizeof(M)==1) MOVE("vpmovqb"); else MOVE("vpmovqw"); }
 else if constexpr(sizeof(M)==1) MOVE("vpmovdb"); else MOVE("vpmovdw"); }
#undef MOVE
#else
typedef char P16 __attribute__((vector_size(16))); typedef char P32 __attribute__((vector_size(32)));
typedef i64 P2 __attribute__((vector_size(16))); typedef i64 P4 __attribute__((vector_size(32)));
typedef int one_int __attribute__((aligned(1),may_alias)); typedef i64 one_long __attribute__((aligned(1),may_alias));
template<class M,class T,class V> INL void put(V*p,T x){ if constexpr(tr<T>::wide) put<M>(p,narrow(x));
 else if constexpr(sizeof(x)==16){ const P16 one={0,4,8,12},two={0,1,4,5,8,9,12,13};
 const P16 y=__builtin_ia32_pshufb128((P16)x,sizeof(M)==1?one:two);
 if constexpr(sizeof(M)==1) *(one_int*)p=bits<typename tr<T>::I>(y)[0]; else *(one_long*)p=((P2)y)[0]; }
 else { const P32 one={0,4,8,12,0,0,0,0,0,0,0,0,0,0,0,0,0,4,8,12},
 two={0,1,4,5,8,9,12,13,0,0,0,0,0,0,0,0,0,1,4,5,8,9,12,13};
 const P32 y=__builtin_ia32_pshufb256((P32)x,sizeof(M)==1?one:two); const P4 z=(P4)y;
 if constexpr(sizeof(M)==1) *(one_long*)p=(z[0]&0xffffffffl)|(z[2]<<32);
 else { *(one_long*)p=z[0]; ((one_long*)p)[1]=z[2]; } } }
#endif
template<class V,class T> INL void put_half(V*p,T x){ asm("vcvtps2ph $0,%1,%0":"=m"(*p):"v"(x)); }
template<class T> INL T through_half(T x){ typename mem<short,sizeof(T)==64?16:8>::V half; T r;
 asm("vcvtps2ph $0,%1,%0":"=v"(half):"v"(x)); asm("vcvtph2ps %1,%0":"=v"(r):"v"(half)); return r; }
#else
#define PACKED 0
template<class R,class M,class V> INL R take(const V*p){ return R{}; }
template<class M,class T,class V> INL void put(V*p,T x){}
template<class V,class T> INL void put_half(V*p,T x){}
template<class T> INL T through_half(T x){ return x; }
#endif
template<class T,class M> struct packed { enum{ low=sizeof(typename tr<T>::E)<4,
 is=PACKED&&tr<T>::n>1&&!low&&sizeof(M)<4&&!__is_same(M,f16), half=PACKED&&tr<T>::n>1&&__is_same(M,f16)}; };
template<class T,class M> INL T ld(const M*p){ typedef typename mem<M,tr<T>::n>::V V;
 if constexpr(packed<T,M>::low&&sizeof(M)==sizeof(typename tr<T>::E)) return (T)*(const V*)p;
 else if constexpr(__is_same(M,bf16)){ typedef typename tr<T>::I I;
 if constexpr(PACKED&&tr<T>::n>1) return bits<T>(take<I,bf16>((const V*)p)<<16);
 else return bits<T>(cvt<I>(*(const V*)p)<<16); }
 else if constexpr(__is_same(M,typename tr<T>::E)) return (T)*(const V*)p;
 else if constexpr(packed<T,M>::half) return cvt<T>(take<typename tr<T>::G,M>((const V*)p));
 else if constexpr(packed<T,M>::is) return cvt<T>(take<typename tr<T>::J,M>((const V*)p));
 else return cvt<T>(*(const V*)p); }
template<class T> INL T ldb(const u8*p){ return narrow(ne(ld<T,u8>(p),bc<T>(0))); }
template<class I,class T> INL I rnbf(T x){ I b=bits<I>(x); I r=(b+0x7fff+((b>>16)&1))>>16;
 return sel(ne(x,x),bc<I>(0x7fc0),r&0xffff); }
#ifdef __clang__
template<class T,T...> struct numbers {};
#define COUNT(T,N) __make_integer_seq<numbers,int,N>()
#else
template<class T,int...> struct numbers {};
#define COUNT(T,N) numbers<int,__integer_pack(N)...>()
#endif
// The halves of 16 floats: the upper words, which no shift has to bring down first.
#if PACKED && defined(__AVX512BW__)
template<class V,class I,int...i> INL V uppers(I b,numbers<int,i...>){ typedef short W __attribute__((vector_size(64)));
 return (V)__builtin_shufflevector((W)b,(W)b,(2*i+1)...); }
template<class V,class T> INL void put_bf(V*p,T x){ typedef typename tr<T>::I I; const I b=bits<I>(x);
 if constexpr(tr<T>::n==16) *p=uppers<V>(sel(ne(x,x),bc<I>(0x7fc00000),b+0x7fff+((b>>16)&1)),COUNT(int,16));
 else put<bf16>(p,rnbf<I,T>(x)); }
#else
template<class V,class T> INL void put_bf(V*p,T x){ put<bf16>(p,rnbf<typename tr<T>::I,T>(x)); }
#endif
template<class M,class T> INL void st(M*p,T x){ enum{N=tr<T>::n}; typedef typename mem<M,N>::V V;
 typedef typename tr<T>::I I;
 if constexpr(packed<T,M>::low&&sizeof(M)==sizeof(typename tr<T>::E)) *(V*)p=(V)x;
 else if constexpr(__is_same(M,bf16)){ if constexpr(N==1) *p=(bf16)rnbf<I,T>(x);
 else if constexpr(PACKED) put_bf((V*)p,x); else *(V*)p=__builtin_convertvector(rnbf<I,T>(x),V); }
 else if constexpr(N==1) *(V*)p=(M)x;
 else if constexpr(__is_same(M,typename tr<T>::E)) *(V*)p=(V)x;
 else if constexpr(packed<T,M>::half&&__is_same(typename tr<T>::E,float)) put_half((V*)p,x);
 else if constexpr(packed<T,M>::is&&__is_same(T,I)) put<M>((V*)p,x);
 else *(V*)p=__builtin_convertvector(x,V); }
// A number that bfloat16 holds needs no rounding.
template<class M,class T> INL void ste(M*p,T x){ typedef typename tr<T>::I I; typedef typename mem<M,tr<T>::n>::V V;
 if constexpr(packed<T,M>::low) *(V*)p=(V)x;
 else { const I b=bits<I>(x)>>16; if constexpr(tr<T>::n==1) *p=(M)b;
 else if constexpr(PACKED) put<M>((V*)p,b); else *(V*)p=__builtin_convertvector(b,V); } }
template<class T> INL void stb(u8*p,T m){ st<u8>(p,m&1); }
// A vector of one number for each lane. GCC puts numbers into lanes one after the other, in four times the time,
// unless it sees all at once.
template<class T,class F,int...i> INL T each_lane(F f,numbers<int,i...>){ return T{f(i)...}; }
template<class T,class F> INL T lanes(F f){ return each_lane<T>(f,COUNT(int,tr<T>::n)); }
template<class T,class M> INL T ldg(const M*p,i64 s){
 return lanes<T>([=](int i){ return ld<typename tr<T>::E,M>(p+i*s); }); }
// Every second element: of two vectors that end where the last one is.
template<class T,int...i> INL T evens(T a,T b,numbers<int,i...>){ enum{N=tr<T>::n};
 return __builtin_shufflevector(a,b,(2*i<N?2*i:2*i+1)...); }
template<class T,class M> INL T ldg2(const M*p){ return evens(ld<T>(p),ld<T>(p+tr<T>::n-1),COUNT(int,tr<T>::n)); }
// The elements before p, the last one first.
template<class T,int...i> INL T reversed(T x,numbers<int,i...>){
 return __builtin_shufflevector(x,x,(tr<T>::n-1-i)...); }
template<class T,class M> INL T ldr(const M*p){ return reversed(ld<T>(p+1-tr<T>::n),COUNT(int,tr<T>::n)); }
template<class T> INL T ldbg(const u8*p,i64 s){ T r; for(int i=0;i<tr<T>::n;i++) r[i]=-(int)(p[i*s]!=0);
 return r; }
template<class M,class T> INL void stg(M*p,i64 s,T x){ for(int i=0;i<tr<T>::n;i++)
 st<M>(p+i*s,(typename tr<T>::E)x[i]); }
template<class T> INL void stbg(u8*p,i64 s,T x){ for(int i=0;i<tr<T>::n;i++) p[i*s]=x[i]&1; }
template<class T> INL T iota(){ T r; if constexpr(tr<T>::n==1) r=0; else for(int i=0;i<tr<T>::n;i++) r[i]=i;
 return r; }
template<class T> INL T round_bf(T x){ typedef typename tr<T>::I I; return bits<T>(rnbf<I,T>(x)<<16); }
template<class T> INL T round_h(T x){ if constexpr(tr<T>::n==1) return (T)(f16)x;
 else if constexpr(PACKED&&__is_same(typename tr<T>::E,float)) return through_half(x);
 else { T r; for(int i=0;i<tr<T>::n;i++) r[i]=(float)(f16)x[i]; return r; } }
// An integer as M holds it.
template<class M,class T> INL T wrap_(T x){ typedef typename tr<T>::E E;
 if constexpr(tr<T>::n==1) return (T)(M)x;
 else if constexpr(sizeof(M)==sizeof(E)) return x;
 else if constexpr((M)-1<0) return x<<(sizeof(E)-sizeof(M))*8>>(sizeof(E)-sizeof(M))*8;
 else return x&(E)(M)-1; }
// A position in a dimension of n; one outside is told to the caller of this call (`outside`), and 0 is read
// instead.
template<class T> INL T at(T i,i64 n,bool wrap,i64*outside){
 if constexpr(tr<T>::n==1){ if(wrap&&i<0)i+=n;
  if((u64)i>=(u64)n){ __atomic_store_n(outside,1,0); i=0; } return i; }
 else { if(wrap) i=sel(lt(i,bc<T>(0)),i+n,i); const auto wrong=lt(i,bc<T>(0))|ge(i,bc<T>(n));
  if(__builtin_expect(some(wrong),0)){ __atomic_store_n(outside,1,0); i=sel(wrong,bc<T>(0),i); } return i; } }
static __thread void* dm_room; static __thread i64 dm_room_size;
static void* room(i64 bytes){ if(bytes>dm_room_size){ dm_room=realloc(dm_room,bytes+64); dm_room_size=bytes;
 } return (void*)(((u64)dm_room+63)&~63ul); }

// == sizes: numbers known only at the call
// `Size`s print in these functions. A row's scratch has room of its own in each thread.
INL i64 floordiv(i64 a,i64 b){ i64 q=a/b; return q-((a%b!=0)&&((a<0)!=(b<0))); }
INL i64 mod(i64 a,i64 b){ i64 r=a%b; return r+((r!=0&&((r<0)!=(b<0)))?b:0); }
INL i64 min(i64 a,i64 b){ return a<b?a:b; }
INL i64 max(i64 a,i64 b){ return a>b?a:b; }
INL i64 up(i64 a,i64 b){ return (a+b-1)/b; }
// Parts in which n rows with sums of `bytes` each are gone through: `least` where it pays, in 4 MB.
static i64 parts(bool pays,i64 n,i64 least,i64 bytes){ i64 c=min(n,pays?least:1);
 while(c>1&&c*bytes>1<<22) c/=2; return max(c,1); }
static __thread void* dm_row; static __thread i64 dm_row_size;
static void* row_room(i64 bytes){ if(bytes>dm_row_size){ dm_row=realloc(dm_row,bytes+64); dm_row_size=bytes;
 } return (void*)(((u64)dm_row+63)&~63ul); }

// == threads: tasks 0 to n, in as many parts as threads where that pays
// A part's numbers are copies, so no store can change them. OpenMP takes as long as a small kernel, on one thread, too.
extern "C" { int omp_get_max_threads(); int omp_get_num_threads(); int omp_get_thread_num(); }
template<class F> static __attribute__((noinline)) void part_(F f,i64 first,i64 last){ f(first,last); }
template<class F> static void over(bool pays,i64 n,int threads,F f){ threads=threads?threads:omp_get_max_threads();
 if(!pays||threads<2){ part_(f,0,n); return; }
#pragma omp parallel num_threads(threads)
 { const i64 t=omp_get_thread_num(),k=omp_get_num_threads(); part_(f,n*t/k,n*(t+1)/k); } }

// == math: what every kernel may use
#define LANE1(name,ff,fd) template<class T> INL T name(T x){ if constexpr(tr<T>::n==1){ \
 if constexpr(tr<T>::wide) return fd(x); else return ff(x); } \
 else { T r; for(int i=0;i<tr<T>::n;i++){ if constexpr(tr<T>::wide) r[i]=fd(x[i]); else r[i]=ff(x[i]); } \
 return r; } }
#define LANE2(name,ff,fd) template<class T> INL T name(T x,T y){ if constexpr(tr<T>::n==1){ \
 if constexpr(tr<T>::wide) return fd(x,y); else return ff(x,y); } \
 else { T r; for(int i=0;i<tr<T>::n;i++){ if constexpr(tr<T>::wide) r[i]=fd(x[i],y[i]); \
 else r[i]=ff(x[i],y[i]); } return r; } }
#define LIBM1(x) LANE1(x##_,__builtin_##x##f,__builtin_##x)
LIBM1(sqrt) LIBM1(floor) LIBM1(ceil) LIBM1(trunc) LIBM1(nearbyint)
template<class T> struct sign_of { enum:long{bit=tr<T>::wide?(long)(1ul<<63):(long)(int)0x80000000}; };
template<class T> INL T copysign_(T x,T y){ typedef typename tr<T>::I I; const I bit=bc<I>(sign_of<T>::bit);
 return bits<T>((bits<I>(x)&~bit)|(bits<I>(y)&bit)); }
template<class T> INL T abs_(T x){ if constexpr(__is_same(typename tr<T>::E,float)) return
 bits<T>(bits<typename tr<T>::I>(x)&0x7fffffff);
 else if constexpr(__is_same(typename tr<T>::E,double)) return
 bits<T>(bits<typename tr<T>::I>(x)&0x7fffffffffffffffl);
 else return sel(lt(x,bc<T>(0)),-x,x); }
// x between two bounds; NaN stays NaN.
template<class T> INL T clamp_(T x,float low,float high){
#ifdef __AVX512F__
 if constexpr(__is_same(typename tr<T>::E,float)&&tr<T>::n==16){
 x=(T)__builtin_ia32_maxps512_mask(bc<T>(low),x,x,(short)-1,4);
 return (T)__builtin_ia32_minps512_mask(bc<T>(high),x,x,(short)-1,4); } else
#endif
 { x=sel(lt(x,bc<T>(low)),bc<T>(low),x); return sel(gt(x,bc<T>(high)),bc<T>(high),x); } }
// c + c' x + c'' x x + ...
template<class T> INL T poly(T x,double c){ return bc<T>((typename tr<T>::E)c); }
template<class T,class...C> INL T poly(T x,double c,C...rest){ return poly(x,rest...)*x+(typename tr<T>::E)c; }
// == running_max_ running_min_ of_last_: the extreme of each lane and those before it; the last lane in all
template<int d,class T,int...i> INL T before(T x,numbers<int,i...>){
 return __builtin_shufflevector(x,x,(i<d?i:i-d)...); }
#define RUNNING(name,of) template<class T,int d=1> INL T name(T x){ if constexpr(d>=tr<T>::n) return x; \
 else return name<T,2*d>(of(x,before<d>(x,COUNT(int,tr<T>::n)))); }
RUNNING(running_max_,max_) RUNNING(running_min_,min_)
template<class T,int...i> INL T lasts(T x,numbers<int,i...>){ return __builtin_shufflevector(x,x,(i*0+tr<T>::n-1)...); }
template<class T> INL T of_last_(T x){ return lasts(x,COUNT(int,tr<T>::n)); }
// == stc_ stcg_: real numbers as complex ones
template<class R> struct complex_ { R re,im; };
typedef complex_<f16> c32; typedef complex_<float> c64; typedef complex_<double> c128;
template<int first,class T,int...i> INL T beside_zeros(T x,numbers<int,i...>){ enum{N=tr<T>::n};
 return __builtin_shufflevector(x,T{},(i%2?N+i:first+i/2)...); }
template<class R,class T> INL void stcg_(complex_<R>*p,i64 step,T x){ enum{N=tr<T>::n};
 if constexpr(N==1){ p->re=(R)x; p->im=0; } else for(int i=0;i<N;i++) stcg_(p+i*step,1,(typename tr<T>::E)x[i]); }
template<class R,class T> INL void stc_(complex_<R>*p,T x){ enum{N=tr<T>::n}; typedef typename tr<T>::I I;
 if constexpr(N>1&&PACKED&&sizeof(R)==2){ R h[N]; st<R>(h,x);
 *(typename mem<int,N>::V*)p=take<I,bf16>((const typename mem<bf16,N>::V*)h); }
 else if constexpr(N>1&&__is_same(typename tr<T>::E,R)){ st<R>((R*)p,beside_zeros<0>(x,COUNT(int,N)));
 st<R>((R*)p+N,beside_zeros<N/2>(x,COUNT(int,N))); }
 else stcg_(p,1,x); }
// == copy_: n elements, as the C library copies most quickly
template<class T,class M> INL void copy_(T*to,const M*from,i64 n){ __builtin_memmove(to,from,n*sizeof(T)); }
// == more_ less_ more_next_ less_next_ more_across_ less_across_: a value and its position become those of another where that is beyond, or as far and before
#define TRACK(name,o) template<class T,class P> INL void name(T&best,P&at,T x,P here){ \
 const auto first=here<at; const auto odd=x!=x; auto m=(x o best)|(odd&(best==best)); \
 const auto tie=(x==best)|(odd&(best!=best)); \
 if constexpr(sizeof(m)==sizeof(first)){ m|=tie&first; at=m?here:at; best=m?x:best; } \
 else { const auto n=narrow(m)|(narrow(tie)&narrow(first)); at=sel(n,here,at); best=sel(n,x,best); } }
TRACK(more_,>) TRACK(less_,<)
// The same of positions that come in order, from 0.
#define TRACK_NEXT(name,o) template<class T,class P> INL void name(T&best,P&at,T x,P here){ \
 const auto m=((x o best)==0)&(best==best); \
 if constexpr(sizeof(m)==sizeof(at)&&tr<T>::n>1){ at=m?here:at; best=m?x:best; } \
 else { const auto n=narrow(m); at=sel(n,here,at); best=sel(n,x,best); } }
TRACK_NEXT(more_next_,<=) TRACK_NEXT(less_next_,>=)
// The best of the lanes, NaN where one is, and the first lane that holds it.
#define TRACK_ACROSS(name,extreme) template<class T,class P,class V,class W> INL void name##across_(T&best,P&at,V x,W here){ \
 const T most=extreme(x); const auto same=eq(x,bc<V>(most))|ne(x,x); \
 const P none=sizeof(P)==8?0x7fffffffffffffffl:0x7fffffff; name(best,at,most,(P)hmin(sel(same,here,bc<W>(none)))); }
TRACK_ACROSS(more_,hmax) TRACK_ACROSS(less_,hmin)

// == library: functions of SLEEF for vectors, which PyTorch's own library exports
// A vector of the processor's common width has a function there, so narrower ones and numbers are
// computed in one: a result does not depend on its place. Without the function, lane by lane.
extern "C" { void* dlopen(const char*,int) noexcept; void* dlsym(void*,const char*) noexcept; }
#if defined(__AVX2__)
#define ROOM 8
#elif defined(__aarch64__)
#define ROOM 4
#else
#define ROOM 0
#endif
template<class T> struct roomy { typedef T V; };
#if ROOM==8
template<> struct roomy<float> { typedef F8 V; }; template<> struct roomy<F4> { typedef F8 V; };
template<> struct roomy<double> { typedef D4 V; };
#elif ROOM==4
template<> struct roomy<float> { typedef F4 V; }; template<> struct roomy<double> { typedef D2 V; };
#endif
template<class T> struct two { T a,b; };
template<class V,class T> INL V in_room(T x){ if constexpr(__is_same(V,T)) return x;
 else if constexpr(tr<T>::n==1) return bc<V>(x); else return bits<V>(two<T>{x,x}); }
template<class T,class V> INL T out_of_room(V v){ if constexpr(__is_same(V,T)) return v;
 else if constexpr(tr<T>::n==1) return v[0]; else return bits<two<T>>(v).a; }
static void* sleef(const char*name,void*lanes){ void*const h=dlopen("libtorch_cpu.so",5); // loaded already
 void*const f=h?dlsym(h,name):0; return f?f:lanes; }
#define SLEEF(x,e) (tr<T>::wide?tr<T>::n==8?"Sleef_" #x "d8" #e:tr<T>::n==4?"Sleef_" #x "d4" #e: \
 "Sleef_" #x "d2" #e:tr<T>::n==16?"Sleef_" #x "f16" #e:tr<T>::n==8?"Sleef_" #x "f8" #e:"Sleef_" #x "f4" #e)
#define LIBRARY1(fn,e) LANE1(fn##_lanes,__builtin_##fn##f,__builtin_##fn) namespace { template<class T> struct fn##_of { \
 static __attribute__((cold,noinline)) T lanes(T x){ return fn##_lanes(x); } static T (*const call)(T); }; \
 template<class T> T (*const fn##_of<T>::call)(T)=(T(*)(T))sleef(SLEEF(fn,e),(void*)lanes); } \
 template<class T> INL T fn##_library(T x){ if constexpr(!ROOM) return fn##_lanes(x); \
 else { typedef typename roomy<T>::V V; return out_of_room<T>(fn##_of<V>::call(in_room<V>(x))); } }
#define LIBRARY2(fn,e) LANE2(fn##_lanes,__builtin_##fn##f,__builtin_##fn) namespace { template<class T> struct fn##_of { \
 static __attribute__((cold,noinline)) T lanes(T x,T y){ return fn##_lanes(x,y); } \
 static T (*const call)(T,T); }; \
 template<class T> T (*const fn##_of<T>::call)(T,T)=(T(*)(T,T))sleef(SLEEF(fn,e),(void*)lanes); } \
 template<class T> INL T fn##_library(T x,T y){ if constexpr(!ROOM) return fn##_lanes(x,y); \
 else { typedef typename roomy<T>::V V; \
 return out_of_room<T>(fn##_of<V>::call(in_room<V>(x),in_room<V>(y))); } }

// == exp_: floats here, doubles from the library
template<class T> INL T exp_(T x){ typedef typename tr<T>::I I;
 if constexpr(tr<T>::wide) return exp_library(x);
#ifdef __AVX512F__
 else if constexpr(tr<T>::n==16){ x=clamp_(x,-200.f,200.f);
 T n=x*1.44269504f+12582912.f; n=n-12582912.f; T r=x-n*0.693359375f; r=r+n*2.12194440e-4f;
 T p=r*1.3814539e-3f+8.3687454e-3f; p=p*r+4.1668389e-2f; p=p*r+1.6666521e-1f; p=p*r+4.9999994e-1f;
 p=p*(r*r)+r+1.f;
 return (T)__builtin_ia32_scalefps512_mask(p,n,p,(short)-1,4); }
#endif
 else { x=clamp_(x,-104.f,89.f);
 T t=x*1.44269504f+12582912.f; T n=t-12582912.f; T r=x-n*0.693359375f; r=r+n*2.12194440e-4f;
 T p=r*1.3814539e-3f+8.3687454e-3f; p=p*r+4.1668389e-2f; p=p*r+1.6666521e-1f; p=p*r+4.9999994e-1f;
 p=p*(r*r)+r+1.f;
 I e=bits<I>(t)-0x4b400000; I a=e>>1; return p*bits<T>((a+127)<<23)*bits<T>((e-a+127)<<23); } }

// == log_: floats here, doubles from the library
template<class T> INL T log_(T x){ typedef typename tr<T>::I I;
 if constexpr(tr<T>::wide) return log_library(x);
 else { auto tiny=lt(x,bc<T>(1.17549435e-38f)); T y=sel(tiny,x*8388608.f,x); I b=bits<I>(y);
 I e=((b-0x3f3504f3)>>23); T m=bits<T>(b-(e<<23))-1.f;
 T n=cvt<T>(e)-sel(tiny,bc<T>(23.f),bc<T>(0.f)); T z=m*m;
 T p=m*7.0376836292e-2f-1.1514610310e-1f; p=p*m+1.1676998740e-1f; p=p*m-1.2420140846e-1f;
 p=p*m+1.4249322787e-1f; p=p*m-1.6668057665e-1f;
 p=p*m+2.0000714765e-1f; p=p*m-2.4999993993e-1f; p=p*m+3.3333331174e-1f; p=p*m*z; p=p+n*-2.12194440e-4f;
 p=p-z*0.5f; T r=m+p+n*0.693359375f;
 r=sel(eq(x,bc<T>(__builtin_inff())),x,r); r=sel(eq(x,bc<T>(0.f)),bc<T>(-__builtin_inff()),r);
 return sel(lt(x,bc<T>(0.f))|ne(x,x),bc<T>(__builtin_nanf("")),r); } }

// == piece_: functions of floats by pieces: each lane takes the coefficients of its interval's polynomial from registers
#if defined(__AVX512F__) && !defined(__clang__)
#define PIECES 1
INL F16 look(F16 row,I16 k){ return (F16)__builtin_ia32_permvarsf512_mask(row,k,row,(short)-1); }
INL F16 look_unless(F16 row,I16 k,I16 none,F16 x){ // x in the lanes where k is `none`
 return (F16)__builtin_ia32_permvarsf512_mask(row,k,x,(short)__builtin_ia32_cmpd512_mask(k,none,4,(short)-1)); }
INL F16 capped(F16 x,float high){ return (F16)__builtin_ia32_minps512_mask(bc<F16>(high),x,x,(short)-1,4); }
INL F16 piece_(F16 t,I16 k,F16 c){ return look(c,k); }
template<class...C> INL F16 piece_(F16 t,I16 k,F16 c,C...rest){ return piece_(t,k,rest...)*t+look(c,k); }
// Numbers and narrow vectors in a vector of 16, and back.
template<class T,int...i> INL F16 spread(T x,numbers<int,i...>){
 if constexpr(tr<T>::n==1) return bc<F16>(x); else return __builtin_shufflevector(x,x,(i%tr<T>::n)...); }
template<class T,int...i> INL T taken(F16 x,numbers<int,i...>){
 if constexpr(tr<T>::n==1) return x[0]; else return __builtin_shufflevector(x,x,i...); }
#define BY_SIXTEEN(name) if constexpr(tr<T>::n!=16) return taken<T>(name(spread(x,COUNT(int,16))),COUNT(int,tr<T>::n)); else
#else
#define PIECES 0
#endif

// == erf_: of floats by pieces or a quotient; of doubles a series beside the nearest of 762 places, filled when the unit is loaded
namespace { struct ErfPlaces { double at[2*1024]; ErfPlaces(){ for(int i=0;i<762;i++){ const long double r=i/128.l;
 at[2*i]=__builtin_erfl(r); at[2*i+1]=1.128379167095512573896l*__builtin_expl(-r*r); } } };
template<class T> struct erf_places { static const ErfPlaces of; }; template<class T> const ErfPlaces erf_places<T>::of; }
template<class T> INL T erf_wide(T x){ typedef typename tr<T>::I I; const double*of=erf_places<typename tr<T>::E>::of.at;
 const double whole=6755399441055744.; T y=abs_(x); y=sel(gt(y,bc<T>(5.93)),bc<T>(5.93),y); const T b=y*128+whole;
 const I i=(bits<I>(b)&1023)*2; const T r=(b-whole)*0.0078125,d=y-r,q=r*r;
 const T height=lanes<T>([=](int n){ return of[lane(i,n)]; }),slope=lanes<T>([=](int n){ return of[lane(i,n)+1]; });
 T s=r*poly(q,-1./6,2./9,-2./45)-rounded_(d*(1./42)); s=s*d+poly(q,0.1,-0.4,2./15); s=s*d+rounded_(r*(0.5-q*(1./3))); 
 s=s*d+poly(q,-1./3,2./3); s=s*d-r; const T part=slope*d,far=height+(part*d*s+part),z=x*x;
 const T near=x*1.1283791670955126+rounded_(x*(z*poly(z,-0.37612638903183754,0.11283791670955931,-0.02686617064664151,
 0.005223977710947899,-0.0008548288017984178,0.00011999565386253541)+1.533545961316588e-17));
 return sel(lt(y,bc<T>(0.125)),near,copysign_(far,x)); }
template<class T> INL T erf_(T x){
 if constexpr(tr<T>::wide) return erf_wide(x);
#if PIECES
 else { BY_SIXTEEN(erf_) { const T y=capped(abs_(x),3.943f),b=y*3.92768264f+12582912.f,t=y-(b-12582912.f)*0.25460306f;
 // In the pieces' middles the function is almost a float; the first piece is y and a polynomial, which keeps its last digit.
 const I16 k=bits<I16>(b);
 const T start=look_unless(F16{0.f,0.28120005f,0.5285527f,0.7199421f,0.850204f,0.92818916f,0.96925664f,0.9882792f,
 0.9960296f,0.9988071f,0.99968255f,0.99992526f,0.99998444f,0.99999714f,0.9999995f,0.99999994f},k,bc<I16>(0x4b400000),
 y);
 return copysign_(piece_(t,k,
 F16{0.12837917f,1.057555f,0.8706559f,0.62963045f,0.3999638f,0.22317798f,0.10939002f,0.04709771f,0.0178122f,
 0.0059174015f,0.0017267928f,0.00044263434f,9.9665696e-5f,1.9712512e-5f,3.4247903e-6f,6.544215e-7f},
 F16{3.1462986e-7f,-0.2692521f,-0.44334126f,-0.48090887f,-0.4073273f,-0.28410983f,-0.16711478f,-0.083934404f,
 -0.036282547f,-0.013554712f,-0.0043920428f,-0.001233681f,-0.00030088262f,-6.3419924e-5f,-5.71309e-6f,0.f},
 F16{-0.37614372f,-0.30683511f,-0.13975726f,0.03500856f,0.14322884f,0.1667235f,0.133721f,0.08403311f,0.043327447f,
 0.018741015f,0.0068866834f,0.002166927f,0.00058695173f,0.0001373792f,2.7861273e-5f,0.f},
 F16{0.00031922787f,0.12789083f,0.18243428f,0.14599788f,0.06290191f,-0.011015894f,-0.04561023f,-0.04703276f,
 -0.031900164f,-0.017282942f,-0.0076155327f,-0.0030115962f,-0.0010272472f,-0.00032099677f,-0.0004453303f,0.f},
 F16{0.11081231f,0.079594396f,0.0067047155f,-0.05502868f,-0.0682129f,-0.044128507f,-0.0118946545f,0.008075381f,
 0.013026554f,0.009906352f,0.0053847125f,0.0023009703f,0.0008038241f,0.00023428941f,5.7694662e-5f,0.f})*t+start,x); } }
#else
 else { x=clamp_(x,-4.f,4.f); T z=x*x;
 T p=z*0.00022905065861350646f+0.0034082910107109506f; p=p*z+0.050955695062380861f;
 p=p*z+0.18520832239976145f; p=p*z+1.128379143519084f;
 T q=z*-1.1791602954361697e-7f+0.000023547966471313185f; q=q*z+0.0010179625278914885f;
 q=q*z+0.014070470171167667f; q=q*z+0.11098505178285362f;
 q=q*z+0.49746925110067538f; q=q*z+1.f; return clamp_(x*p/q,-1.f,1.f); }
#endif
}

// == tanh_: floats here, by pieces where there are registers for that; doubles from the library
template<class T> INL T tanh_(T x){
 if constexpr(tr<T>::wide) return tanh_library(x);
#if PIECES
 // Four pieces an octave of 1+|x|; the last ones are 1.
 else { BY_SIXTEEN(tanh_) { const T y=capped(abs_(x),9.f); const I16 k=bits<I16>(y+1)>>21;
 const T t=y-look(
 F16{1.2460318f,1.7538513f,2.250282f,2.7536938f,3.4966195f,4.4981236f,5.503049f,6.498973f,7.996001f,9.f,9.f,9.f,0.f,
 0.37669867f,0.62651473f,0.8767275f},k);
 return copysign_(piece_(t,k,
 F16{0.84716713f,0.9418123f,0.9780384f,0.9919194f,0.99816555f,0.9997523f,0.9999668f,0.99999547f,0.99999976f,1.f,1.f,
 1.f,0.f,0.35983703f,0.5556477f,0.7047761f},
 F16{0.28230774f,0.11298959f,0.04344094f,0.01609591f,0.0036656093f,0.00049538293f,6.639983e-5f,9.0600115e-6f,
 4.5368583e-7f,0.f,0.f,0.f,1.f,0.8705173f,0.6912557f,0.50329065f},
 F16{-0.23916215f,-0.1064149f,-0.042486914f,-0.015965842f,-0.0036588395f,-0.0004952557f,-6.639756e-5f,-9.059772e-6f,
 -2.5115148e-7f,0.f,0.f,0.f,-1.0652094e-6f,-0.31324434f,-0.3840946f,-0.3547072f},
 F16{0.10852191f,0.06256605f,0.027073957f,0.010471168f,0.0024279885f,0.0003296612f,4.4215536e-5f,6.03414e-6f,
 3.0216668e-7f,0.f,0.f,0.f,-0.33327168f,-0.17745674f,-0.017006494f,0.08222006f},
 F16{-0.012188616f,-0.023456732f,-0.0123168f,-0.0050649093f,-0.0012056377f,-0.00016471637f,-2.2102764e-5f,
 -3.0184754e-6f,-6.8778087e-7f,0.f,0.f,0.f,-0.0011646721f,0.16826496f,0.1374706f,0.060285497f},
 F16{-0.020040097f,0.003534219f,0.0039744885f,0.0019026798f,0.000493528f,6.85464e-5f,9.219374e-6f,1.2569832e-6f,
 6.54634e-8f,0.f,0.f,0.f,0.14299573f,0.018230006f,-0.054395378f,-0.058238804f},
 F16{0.01506552f,0.002096839f,-0.00072553003f,-0.000543998f,-0.00015768899f,-2.2613809e-5f,-3.0817766e-6f,
 -4.1564408e-7f,3.3493887e-7f,0.f,0.f,0.f,-0.036841083f,-0.068956025f,-0.02328796f,0.013218084f}),x); } }
#else
 // m/(m+1), m = expm1(2|x|)/2: nothing cancels at either end. The shift leaves the exponent of 2^n alone.
 else { typedef typename tr<T>::I I; T y=abs_(x); y=sel(gt(y,bc<T>(9.1f)),bc<T>(9.1f),y);
 T t=y*2.88539008f+12583039.f; T n=t-12583039.f;
 T r=y-n*0.3466796875f; r=r+n*1.06097220e-4f; T p=r*4.42065248e-02f+1.33899926e-01f; p=p*r+3.33347112e-01f;
 p=p*r+6.66660840e-01f; p=p*r+9.99999880e-01f; p=p*(r*r)+r;
 T two=bits<T>(bits<I>(t)<<23); T m=p*two+(two*0.5f-0.5f);
 return bits<T>(bits<I>(m/(m+1))|(bits<I>(x)&(int)0x80000000)); }
#endif
}

// == expm1_: half of it is r*half+(half-0.5), plus the rounding errors of these sums and the polynomial's other terms
template<class T> INL T expm1_(T x){ if constexpr(tr<T>::wide) return expm1_library(x);
 else { typedef typename tr<T>::I I; T y=clamp_(x,-18.f,89.f);
 T t=y*1.44269504f+12583039.f; T n=t-12583039.f; T high=y-n*0.693359375f; T low=n*2.12194440e-4f; T r=high+low;
 T p=r*1.99533897e-4f+1.39357755e-3f; p=p*r+8.33319779e-3f; p=p*r+4.16664556e-2f; p=p*r+1.66666672e-1f; p=p*r+0.5f;
 T half=bits<T>((bits<I>(t)-1)<<23); T less=half-0.5f; T lost=(half-less)-0.5f;
 T part=high*half; T sum=part+less; lost=lost+(part-(sum-less));
 T m=sum+((p*(r*r)+low)*half+lost); return copysign_(m+m,x); } }

// == log1p_: the logarithm of 1+x; the rounding errors of 1+x and of the sum with the exponent's part join the small terms
template<class T> INL T log1p_(T x){ if constexpr(tr<T>::wide) return log1p_library(x);
 else { typedef typename tr<T>::I I; T u=x+1.f; I b=bits<I>(u); I e=((b-0x3f3504f3)>>23);
 T lost=sel(gt(x,bc<T>(1.f)),1.f-(u-x),x-(u-1.f));
 I s=bc<I>(0x3f800000)-(e<<23); lost=lost*bits<T>(sel(lt(s,bc<I>(0)),bc<I>(0),s));
 T high=bits<T>(b-(e<<23))-1.f; T m=high+lost; T n=cvt<T>(e); T z=m*m;
 T p=m*7.0376836292e-2f-1.1514610310e-1f; p=p*m+1.1676998740e-1f; p=p*m-1.2420140846e-1f;
 p=p*m+1.4249322787e-1f; p=p*m-1.6668057665e-1f;
 p=p*m+2.0000714765e-1f; p=p*m-2.4999993993e-1f; p=p*m+3.3333331174e-1f; p=p*m*z; p=p+n*-2.12194440e-4f;
 p=p-z*0.5f; T sum=n*0.693359375f+high; lost=lost+(high-(sum-n*0.693359375f));
 T r=copysign_(sum+(p+lost),x);
 r=sel(eq(x,bc<T>(__builtin_inff())),x,r); r=sel(eq(x,bc<T>(-1.f)),bc<T>(-__builtin_inff()),r);
 return sel(lt(x,bc<T>(-1.f))|ne(x,x),bc<T>(__builtin_nanf("")),r); } }

// == asinh_ acosh_: log(y+sqrt(y*y±1)) where nothing cancels, and log(y)+log(2) where the square is too large
template<class T> struct square { enum:long{most=1l<<(tr<T>::wide?60:30)}; };
template<class T> INL T asinh_(T x){ const T y=abs_(x),z=y*y,b=y+z/(1+sqrt_(z+1)); const auto far=gt(y,bc<T>(square<T>::most));
 return copysign_(log1p_(sel(far,y,b))+sel(far,bc<T>(0.693147180559945309),bc<T>(0)),x); }
template<class T> INL T acosh_(T x){ const T t=x-1,b=t+sqrt_(t*(t+2)); const auto far=gt(x,bc<T>(square<T>::most));
 return sel(lt(t,bc<T>(0)),bc<T>(__builtin_nanf("")),log1p_(sel(far,x,b))+sel(far,bc<T>(0.693147180559945309),bc<T>(0))); }

// == sinh_ cosh_: of floats near the largest, by e**(|x|-log(2)), since e**|x| is too large; the rest is the library's
template<class T> INL T half_exp_(T y){ const T e=exp_(y-0.693359375f); return e+e*2.12216955e-4f; }
template<class T> INL T sinh_(T x){ const T r=sinh_library(x); if constexpr(tr<T>::wide) return r;
 else { const T y=abs_(x); return sel(gt(y,bc<T>(88.f)),copysign_(half_exp_(y),x),r); } }
template<class T> INL T cosh_(T x){ const T r=cosh_library(x); if constexpr(tr<T>::wide) return r;
 else { const T y=abs_(x); return sel(gt(y,bc<T>(88.f)),half_exp_(y),r); } }

// == turned_: x less n times pi/2, as r-rest, of floats up to 2^17: near and the sum of rounding errors are exact
template<class T> INL T turned_(T x,T n,T&rest){ const T high=bc<T>(1.57079625f),middle=bc<T>(7.54978942e-8f);
 const T near=fma_(-high,n,x),c=rounded_(middle*n),r=near-c;
 rest=fma_(bc<T>(5.39030253e-15f),n,fma_(middle,n,-c)+(c-(near-r))); return r; }
template<class T,class F> INL T or_beyond(T x,T y,F library){ const auto far=gt(abs_(x),bc<T>(131072.f));
 return __builtin_expect(some(far),0)?sel(far,library(x),y):y; }

// == wave_: the sine of x and so many quarters of a turn: sine or cosine of the rest
template<class T> INL T wave_(T x,int quarters){ typedef typename tr<T>::I I; const T t=x*0.636619772f+12582912.f;
 T rest; const T r=turned_(x,t-12582912.f,rest),z=r*r,h=r*-0.5f; const I k=bits<I>(t)+quarters;
 T p=z*-1.9507474e-4f+8.332104e-3f; p=p*z-0.16666654f; const T sine=r-(rest-z*(r*p+rounded_(rest*0.5f)));
 T q=z*2.442943e-5f-1.3887294e-3f; q=q*z+4.1666646e-2f;
 const T w=fma_(h,r,bc<T>(1)),cosine=w+(fma_(h,r,1-w)+(z*z*q+rounded_(r*rest)));
 return bits<T>(bits<I>(sel(ne(k&1,bc<I>(0)),cosine,sine))^(k>>1<<31)); }

// == sin_: of floats here, up to 2^17
template<class T> INL T sin_(T x){ if constexpr(tr<T>::wide||!FUSED) return sin_library(x);
 else return or_beyond(x,wave_(x,0),[](T x){ return sin_library(x); }); }

// == cos_: of floats here, up to 2^17
template<class T> INL T cos_(T x){ if constexpr(tr<T>::wide||!FUSED) return cos_library(x);
 else return or_beyond(x,wave_(x,1),[](T x){ return cos_library(x); }); }

// == tan_: of floats here, up to 2^17; inverted where the multiple of pi/2 is odd
template<class T> INL T tan_(T x){ typedef typename tr<T>::I I; if constexpr(tr<T>::wide||!FUSED) return tan_library(x);
 else { T t=x*0.636619772f+12582912.f,rest; const T r=turned_(x,t-12582912.f,rest),z=r*r;
 T p=z*4.5012506e-3f-1.5669684e-4f; p=p*z+1.1023372e-2f; p=p*z+2.1212999e-2f; p=p*z+5.4072518e-2f; p=p*z+0.13332562f;
 p=p*z+0.33333352f; const T s=z*(r*p-rounded_(1.4f*rest))-rest,high=r+s,low=(r-high)+s,q=-1/high;
 const T y=sel(ne(bits<I>(t)&1,bc<I>(0)),q+q*(fma_(high,q,bc<T>(1))+low*q),high);
 return or_beyond(x,y,[](T x){ return tan_library(x); }); } }

// == erfc_: from 0.4765 on e**(-y*y) P(t)/(2y+1), t=(y-k)/(y+k); the rounding errors of y*y, t, P and the quotients are added
// Where k is these numbers, the first coefficients of P have hardly any.
template<class T> INL T erfc_(T x){ if constexpr(!FUSED) return erfc_library(x); else {
 typedef typename tr<T>::I I; typedef typename tr<T>::E E; constexpr bool wide=tr<T>::wide;
 const int digits=wide?52:23,bias=wide?1023:127;
 const E k=wide?3.5400390625:2.265625,end=wide?27.3:10.1,whole=wide?6755399441055744.:12582912.;
 T y=abs_(x); y=sel(gt(y,bc<T>(end)),bc<T>(end),y);
 const T square=rounded_(y*y),b=square*(E)-1.4426950408889634+whole,n=b-whole; T r=fma_(bc<T>(
 wide?-0.69314718036912382:-0.693359375),n,-square);
 r=r-fma_(n,bc<T>(wide?1.9082149292705877e-10:-2.12194440e-4),fma_(y,y,-square));
 const T sum=y+k,odd=y+y+1,both=1/(sum*odd),high=y-k,t=rounded_(high*(both*odd)),inverse=both*sum; T s,p,near;
 if constexpr(wide){
 s=poly(r,0.5000000000000013,0.16666666666666685,0.04166666666651117,0.008333333333315918,0.00138888889480444,
 0.0001984126989880591,2.4801488929715577e-05,2.755723268541503e-06,2.763162978020398e-07,2.511273148042156e-08);
 p=poly(t,-0.14011533551686745,-0.008116440315013263,0.09501680513163441,-0.11421701007803728,0.08889600238659515,
 -0.05054858717645915,0.020585141124045126,-0.005014334341243698,-6.0292347777713296e-05,0.0005651261018575925,
 -0.00015627318541320875,-3.21919801190916e-05,2.6930728472126942e-05,1.0181894952415685e-07,-3.8984568842027466e-06,
 3.3953320913369194e-07,5.818102445216048e-07,-6.983891310419623e-08,-8.776479719414547e-08,7.722138332422152e-09,
 9.653371951796288e-09);
 near=poly(square,1.1283791670955126,-0.37612638903182993,0.11283791670892486,-0.026866170623843316,0.005223977246178388,
 -0.0008548287849207102,0.00012052899110853797,-1.4835726434189724e-05,1.4629470770459352e-06); }
 else { s=poly(r,0.5,0.16666515,0.041666456,0.0083692465,0.001393578);
 p=poly(t,-0.11115343,-0.12868345,0.16499384,-0.084626816,0.012759255,0.00774654,-0.0027774023,-0.0008857539,0.00037419223);
 near=poly(square,1.1283791,-0.37612385,0.11280147,-0.026630549,0.0045108646); }
 const E first=wide?1.2415526421129113:1.2705969; s=r*r*s+r; const T part=rounded_(t*p); p=part+first;
 const T t_low=(fma_(-t,sum,high)-t*(y-(sum-k))+(y-(high+k)))*both*odd;
 const T q=rounded_(p*inverse),low=(fma_(-q,odd,p)-q*(y+y-(odd-1))+((first-p)+part))*inverse-rounded_(q*(t_low*t*0.25f));
 const I e=bits<I>(b)-bits<I>(bc<T>(whole)); // down to subnormal numbers: in two steps
 const T z=(q+(q*s+(low*s+low)))*bits<T>((e+(bias+64))<<digits)*(E)0x1p-64;
 return sel(lt(y,bc<T>(0.4765f)),1-x*near,sel(lt(x,bc<T>(0)),2-z,z)); } }

// == hypot_: of floats by doubles, in which squares and their sum have room; of doubles the library's
template<class T> INL T hypot_(T x,T y){ if constexpr(tr<T>::wide) return hypot_library(x,y);
 else if constexpr(tr<T>::n==1){ const double a=x,b=y; const float r=(float)__builtin_sqrt(a*a+b*b);
 return abs_(x)==__builtin_inff()||abs_(y)==__builtin_inff()?__builtin_inff():r; }
 else { typedef typename tr<T>::W W; const W a=cvt<W>(x),b=cvt<W>(y); const T most=bc<T>(__builtin_inff());
 return sel(eq(abs_(x),most)|eq(abs_(y),most),most,cvt<T>(sqrt_(a*a+b*b))); } }
// == sigmoid_: by exp_
template<class T> INL T sigmoid_(T x){ return 1/(1+exp_(-x)); }

// == rsqrt_: a root and a quotient
template<class T> INL T rsqrt_(T x){ return 1/sqrt_(x); }

// == floordivf_: as eager divides; SLEEF's remainder of a number much larger than the divisor is NaN
template<class T> INL T floordivf_(T a,T b){ const T o=bc<T>(0); T m=fmod_(a,b);
 m=sel(ne(m,m)&eq(a-a,o),o,m); T d=(a-m)/b;
 d=sel(ne(m,o)&(lt(b,o)^lt(m,o)),d-1,d); T f=floor_(d); f=sel(gt(d-f,bc<T>(0.5f)),f+1,f);
 return sel(eq(b,o),a/b,sel(ne(d,o),f,copysign_(o,a/b))); }

// == remf_: a remainder with the sign of the divisor
template<class T> INL T remf_(T a,T b){ const T o=bc<T>(0),m=fmod_(a,b);
 return sel(ne(m,o)&(lt(b,o)^lt(m,o)),m+b,m); }

// == logaddexp_: of equal infinities, too
template<class T> INL T logaddexp_(T a,T b){ const T m=max_(a,b),d=min_(a,b);
 return sel(ne(d,m)|eq(m-m,bc<T>(0)),m+log1p_(exp_(d-m)),m); }

// == floordivi_ remi_ truncdivi_: division of integers by a number that is not 0
// In vectors by the divisor's reciprocal in doubles, to the nearest number, which the sign of the remainder puts
// right; 64 bits have more digits, so theirs is the remainder of a first quotient, all modulo 2^64.
template<class T> INL T floored(T a,T b,T&r){ typedef typename tr<T>::W D; const D inverse=1/cvt<D>(b);
 const double near=6755399441055744.; T q{}; r=a;
 if constexpr(tr<T>::wide){ q=cvt<T>(cvt<D>(a)*inverse); r=a-q*b; }
 const T more=cvt<T>((cvt<D>(r)*inverse+near)-near); q+=more; r-=more*b;
 const auto other=lt(r^b,bc<T>(0))&ne(r,bc<T>(0)); r=sel(other,r+b,r); return sel(other,q-1,q); }
#ifdef __AVX512DQ__
#define FLOORED(T) constexpr(tr<T>::n>1)
#else
#define FLOORED(T) constexpr(tr<T>::n>1&&!tr<T>::wide)
#endif
template<class E> INL E idiv1(E a,E b){ E q=a/b; return q-((a%b!=0)&&((a<0)!=(b<0))); }
template<class E> INL E irem1(E a,E b){ E r=a%b; return r+((r!=0&&((r<0)!=(b<0)))?b:0); }
template<class E> INL E itrunc1(E a,E b){ return a/b; }
LANE2(floordivi_lanes,idiv1<int>,idiv1<i64>) LANE2(remi_lanes,irem1<int>,irem1<i64>)
LANE2(truncdivi_lanes,itrunc1<int>,itrunc1<i64>)
template<class T> INL T floordivi_(T a,T b){ T r; if FLOORED(T) return floored(a,b,r);
 else return floordivi_lanes(a,b); }
template<class T> INL T remi_(T a,T b){ T r; if FLOORED(T){ floored(a,b,r); return r; } else return remi_lanes(a,b); }
template<class T> INL T truncdivi_(T a,T b){ T r;
 if FLOORED(T){ const T q=floored(a,b,r); return sel(lt(q,bc<T>(0))&ne(r,bc<T>(0)),q+1,q); }
 else return truncdivi_lanes(a,b); }

// == transpose_: a square of vectors in registers
template<int H,class T,int...i> INL void swap_blocks(T&a,T&b,numbers<int,i...>){ enum{N=tr<T>::n};
 const T x=__builtin_shufflevector(a,b,((i&H)?N+(i-H):i)...),y=__builtin_shufflevector(a,b,((i&H)?N+i:i+H)...);
 a=x; b=y; }
template<int H,class T> INL void transpose_blocks(T*t){
#pragma GCC unroll 16
 for(int i=0;i<tr<T>::n;i++) if(!(i&H)) swap_blocks<H>(t[i],t[i+H],COUNT(int,tr<T>::n)); }
template<class T> INL void transpose_(T*t){ if constexpr(tr<T>::n==16) transpose_blocks<8>(t);
 if constexpr(tr<T>::n>=8) transpose_blocks<4>(t); transpose_blocks<2>(t); transpose_blocks<1>(t); }

// == keep: long sums in strips
template<class T> INL void keep(T&total,T&lost,T&strip){ const T y=strip-lost,t=total+y;
 lost=sel(eq(t-t,T{}),(t-total)-y,T{}); total=t; strip=T{}; }
template<class T> static __attribute__((noinline)) void keep_all(float*strips,i64 n){ i64 i=0;
 typedef typename mem<float,tr<T>::n>::V V;
 for(;i+tr<T>::n<=n;i+=tr<T>::n){ T t=ld<T>(strips+n+i),l=ld<T>(strips+2*n+i),s=ld<T>(strips+i); keep(t,l,s);
  st<float>(strips+i,s); st<float>(strips+n+i,t); st<float>(strips+2*n+i,l); }
 for(;i<n;i++) keep(strips[n+i],strips[2*n+i],strips[i]); }

// == random: Philox4x32-10, uniform numbers of linear indices, bit-equal to graph/prims.py
#ifdef __AVX512F__
#define PW 16
#else
#define PW 8
#endif
typedef u32 W8 __attribute__((vector_size(PW*4))); typedef u64 Q4 __attribute__((vector_size(PW*4)));
typedef int J8 __attribute__((vector_size(PW*4)));
typedef float X8 __attribute__((vector_size(PW*4),aligned(4),may_alias));
INL void mulhilo(W8 a,u32 m,W8&hi,W8&lo){ Q4 ev=((Q4)a&0xffffffffUL)*(u64)m, od=((Q4)a>>32)*(u64)m;
 lo=(W8)((ev&0xffffffffUL)|(od<<32)); hi=(W8)((ev>>32)|(od&0xffffffff00000000UL)); }
INL void philox8(W8 c[4],u32 k0,u32 k1){ for(int r=0;r<10;r++){ W8 h0,l0,h1,l1;
 mulhilo(c[0],0xD2511F53u,h0,l0); mulhilo(c[2],0xCD9E8D57u,h1,l1);
 W8 n0=h1^c[1]^k0,n2=h0^c[3]^k1; c[0]=n0;c[1]=l1;c[2]=n2;c[3]=l0; k0+=0x9E3779B9u;k1+=0xBB67AE85u; } }
INL X8 unit(W8 w){ return __builtin_convertvector((J8)(w>>8),X8)*5.9604644775390625e-8f; }
#if PW==16
#define PART(m) { W8 a=__builtin_shufflevector(c[0],c[1],4*m,16+4*m,0,0,4*m+1,17+4*m,0,0,4*m+2,18+4*m,0,0, \
 4*m+3,19+4*m,0,0); \
 W8 b=__builtin_shufflevector(c[2],c[3],0,0,4*m,16+4*m,0,0,4*m+1,17+4*m,0,0,4*m+2,18+4*m,0,0,4*m+3,19+4*m); \
 *(X8*)(o+PW*m)=unit(__builtin_shufflevector(a,b,0,1,18,19,4,5,22,23,8,9,26,27,12,13,30,31)); }
#else
#define PART(m) { W8 a=__builtin_shufflevector(c[0],c[1],2*m,8+2*m,0,0,2*m+1,9+2*m,0,0), \
 b=__builtin_shufflevector(c[2],c[3],0,0,2*m,8+2*m,0,0,2*m+1,9+2*m); \
 *(X8*)(o+PW*m)=unit(__builtin_shufflevector(a,b,0,1,10,11,4,5,14,15)); }
#endif
INL void philox_block(float*o,u32 block,u32 stream,i64 seed){ W8 n; for(int i=0;i<PW;i++) n[i]=i;
 W8 c[4]={n+block,W8{},W8{}+stream,W8{}};
 philox8(c,(u32)seed,(u32)(seed>>32)); PART(0) PART(1) PART(2) PART(3) }
static __attribute__((noinline)) void philox_fill(float*o,i64 seed,u32 stream,i64 base,i64 n){
 float t[4*PW]; i64 i=0,s=base&3;
 if(s){ philox_block(t,base>>2,stream,seed); for(;i<n&&i<4*PW-s;i++) o[i]=t[s+i]; }
 for(;i+4*PW<=n;i+=4*PW) philox_block(o+i,(base+i)>>2,stream,seed);
 if(i<n){ philox_block(t,(base+i)>>2,stream,seed); for(int j=0;i<n;i++,j++) o[i]=t[j]; } }
static __attribute__((noinline)) float philox_one(i64 seed,u32 stream,i64 i){ float t[4*PW];
 philox_block(t,i>>2,stream,seed); return t[i&3]; }

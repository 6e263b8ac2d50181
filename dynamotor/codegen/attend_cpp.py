"""The C++ of `dynamotor::attend`: several threads share a head's keys, and a block of keys that the mask
excludes for every row is not read.

Each task goes through every `chunks`-th block of a head with a running maximum and sum a row (Milakov and
Gimelshein, 2018); the tasks' parts are put together at the end.

>>> function, buffers, numbers = kernel(step)           # `function` runs on their pointers and the numbers
"""

from __future__ import annotations

import torch

from ..base.cache import digest
from ..base.config import config
from ..graph.sizes import Dim
from ..lower.program import BufRef, ExternStep
from .cpp import CFunction
from .cpp_kernel import PARALLEL_WORK, machine_width

BLOCK = 64  # keys
LEAST_KEYS = 256  # that a task goes through
_TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "f16"}

_TEXT = """
namespace {{ namespace {name}_ {{
typedef F{width} V; typedef {kind} T; typedef {mask} M;
enum {{R={rows}, E={e}, F={f}, N={block}, W={width}, TOGETHER=2*F/W<=16&&R>1?2:1}};
struct Part {{ float top[R], total[R], sum[R*F]; }};
struct Rows {{ const i64*n; i64 at(i64 b,i64 h) const {{ return n[0]+b*n[1]+h*n[2]; }} }}; // offset, strides
#define NONE (-__builtin_inff())
#define WHOLE _Pragma("GCC unroll 16")
#define PICK __builtin_shufflevector
// The sums of four vectors' lanes: halves of two vectors are added at once.
INL F4 sums(V a,V b,V c,V d){{
#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
 {sums}
#else
 return F4{{hsum(a),hsum(b),hsum(c),hsum(d)}};
#endif
 }}
// The mask of a block as scores; whether any key of it counts.
INL bool masked(float*s,const M*mask,i64 row,i64 step,int n){{ typename tr<V>::I live={{}};
 for(int r=0;r<R;r++){{ int j=0; const M*m=mask+r*row;
  if(step==1) for(;j+W<=n;j+=W){{ V a=ld<V>(m+j); st(s+r*N+j,a); live|=ne(a,bc<V>(NONE)); }}
  for(;j<N;j++){{ float a=j<n?ld<float>(m+j*step):NONE; s[r*N+j]=a;
   live[0]|=-(int)(a!=NONE); }} }}
 return hany(live); }}
INL void unmasked(float*s,int n){{
 for(int r=0;r<R;r++) for(int j=0;j<N;j++) s[r*N+j]=j<n?0.f:NONE; }}
INL void scored(float*s,const float*q,const T*k,i64 step,int n){{
 for(int j=0;j<n;j+=4){{ const T*key[4]; WHOLE for(int i=0;i<4;i++) key[i]=k+(j+i<n?j+i:n-1)*step;
  for(int r=0;r<R;r++){{ V x[4]={{}}; WHOLE for(int e=0;e<E;e+=W){{ const V y=ld<V>(q+r*E+e);
    WHOLE for(int i=0;i<4;i++) x[i]=fma_(y,ld<V>(key[i]+e),x[i]); }}
   st(s+r*N+j,ld<F4>(s+r*N+j)+sums(x[0],x[1],x[2],x[3])); }} }} }}
// Scores become weights under the new maximum; the sums before are to shrink.
INL float weighed(Part&p,float*w,int r){{ V m=ld<V>(w);
 for(int j=W;j<N;j+=W) m=max_(m,ld<V>(w+j));
 const float high=max_(p.top[r],hmax(m)),base=high==NONE?0:high;
 const float shrink=exp_(bc<V>(p.top[r]-base))[0]; V all={{}};
 for(int j=0;j<N;j+=W){{ V x=exp_(ld<V>(w+j)-base); st(w+j,x); all+=x; }}
 p.total[r]=p.total[r]*shrink+hsum(all); p.top[r]=high; return shrink; }}
// The weighted values of some rows.
template<int C> INL void added(float*sum,const float*shrink,const float*w,const T*v,i64 step,int n){{
 V a[C][F/W]; WHOLE for(int c=0;c<C;c++) WHOLE for(int f=0;f<F/W;f++) a[c][f]=ld<V>(sum+c*F+f*W)*shrink[c];
 for(int j=0;j<n;j++){{ V x[C]; WHOLE for(int c=0;c<C;c++) x[c]=bc<V>(w[c*N+j]);
  WHOLE for(int f=0;f<F/W;f++){{ const V y=ld<V>(v+j*step+f*W);
   WHOLE for(int c=0;c<C;c++) a[c][f]=fma_(x[c],y,a[c][f]); }} }}
 WHOLE for(int c=0;c<C;c++) WHOLE for(int f=0;f<F/W;f++) st(sum+c*F+f*W,a[c][f]); }}
static void attend(Part&p,const T*q,const i64*qs,const T*k,i64 ks,const T*v,i64 vs,const M*mask,const i64*ms,
 i64 first,i64 last,i64 step){{
 float rows[R*E] __attribute__((aligned(64))), s[R*N] __attribute__((aligned(64))), shrink[R];
 for(int r=0;r<R;r++) for(int e=0;e<E;e++) rows[r*E+e]=ld<float>(q+r*qs[3]+e*qs[4])*{scale}f;
 for(int r=0;r<R;r++){{ p.top[r]=NONE; p.total[r]=0; }}
 for(int i=0;i<R*F;i++) p.sum[i]=0;
 for(i64 at=first;at<last;at+=step){{ const int n=last-at<N?last-at:N;
  if(!{masked}) unmasked(s,n); else if(!masked(s,mask+at*ms[4],ms[3],ms[4],n)) continue;
  scored(s,rows,k+at*ks,ks,n);
  for(int r=0;r<R;r++) shrink[r]=weighed(p,s+r*N,r);
  int r=0; for(;r+TOGETHER<=R;r+=TOGETHER) added<TOGETHER>(p.sum+r*F,shrink+r,s+r*N,v+at*vs,vs,n);
  for(;r<R;r++) added<1>(p.sum+r*F,shrink+r,s+r*N,v+at*vs,vs,n); }} }}
static void join(const Part*all,i64 chunks,T*out,i64 row,i64 step){{
 for(int r=0;r<R;r++){{ float high=NONE,total=0,sum[F];
  for(int f=0;f<F;f++) sum[f]=0;
  for(i64 c=0;c<chunks;c++) high=max_(high,all[c].top[r]);
  for(i64 c=0;c<chunks&&high!=NONE;c++){{ const float x=exp_(bc<V>(all[c].top[r]-high))[0];
   total+=all[c].total[r]*x; for(int f=0;f<F;f++) sum[f]+=all[c].sum[r*F+f]*x; }}
  for(int f=0;f<F;f++) st<T>(out+r*row+f*step,total==0?0.f:sum[f]/total); }} }}
#undef NONE
#undef WHOLE
#undef PICK
}} }}
// Numbers: batch, heads, keys, then an offset and four strides of q, k, v, the mask and the result.
extern "C" void {name}(void**p,const i64*n){{ using namespace {name}_;
 const i64 heads=n[1],length=n[2],groups=n[0]*heads; i64 chunks=2*({threads})/max(groups,1);
 chunks=max(1,min(chunks,length/{least}));
 const Rows q{{n+3}},k{{n+8}},v{{n+13}},m{{n+18}},o{{n+23}}; T*out=(T*)p[{count}-1];
 Part*parts=(Part*)room(groups*chunks*sizeof(Part));
 over(groups*chunks>1&&groups*length*(E+F)*R>{work},groups*chunks,{fixed},[=](i64 first_,i64 last_){{
  for(i64 t=first_;t<last_;t++){{ const i64 c=t%chunks,b=t/chunks/heads,h=t/chunks%heads;
   attend(parts[t],(const T*)p[0]+q.at(b,h),q.n,(const T*)p[1]+k.at(b,h),k.n[3],
    (const T*)p[2]+v.at(b,h),v.n[3],{masked}?(const M*)p[3]+m.at(b,h):0,m.n,c*N,length,chunks*N); }} }});
 for(i64 g=0;g<groups;g++) join(parts+g*chunks,chunks,out+o.at(g/heads,g%heads),o.n[3],o.n[4]); }}
"""


def _sums(width: int) -> str:
    """C++ for the sums of four vectors' lanes: halves of two vectors are added at once, down to one each."""
    half, quarter = width // 2, width // 4

    def added(x: str, y: str, starts: list[int], n: int) -> str:
        first = [start + i for start in starts for i in range(n)]
        picks = (f"PICK({x},{y},{','.join(str(i + more) for i in first)})" for more in (0, n))
        return "+".join(picks)

    lines = [f"V {p}={added(x, y, [0, width], half)};" for p, x, y in (("p", "a", "b"), ("q", "c", "d"))]
    lines.append(f"V s{quarter}={added('p', 'q', [0, half, width, width + half], quarter)};")
    while quarter > 1:
        old, quarter = f"s{quarter}", quarter // 2
        starts = [2 * quarter * k for k in range(4)]
        lines.append(f"F{4 * quarter} s{quarter}={added(old, old, starts, quarter)};")
    return "\n ".join([*lines, "return s1;"])


def kernel(step: ExternStep) -> tuple[CFunction, list[str], list[Dim]]:
    """The function of a call of `attend`, the buffers whose pointers it takes, and its numbers."""
    query, key, value, mask, scale, stride = step.args
    tensors = [query, key, value, *([] if mask is None else [mask])]
    numbers: list[Dim] = [*query.shape[:2], key.shape[2]]
    for ref in tensors:
        numbers += [ref.offset, *_strides(ref)]
    numbers += [*([0] * 5 if mask is None else []), 0, *stride]
    function = _function(query, value, mask, scale)
    return function, [*[ref.name for ref in tensors], str(step.outs[0])], numbers


def _strides(ref: BufRef) -> list[Dim]:
    """A view's strides, 0 where a mask's one element serves all."""
    return [0 if n == 1 else step for n, step in zip(ref.shape, ref.stride, strict=True)]


def _function(query: BufRef, value: BufRef, mask: BufRef | None, scale: float) -> CFunction:
    rows, e, f = query.shape[2], query.shape[3], value.shape[3]
    assert type(rows) is int and type(e) is int and type(f) is int
    width = next(w for w in (16, 8, 4) if w <= machine_width() and e % w == f % w == 0)
    facts = {
        "kind": _TYPES[query.dtype],
        "mask": _TYPES[torch.float32 if mask is None else mask.dtype],
        "masked": int(mask is not None),
        "count": 4 + (mask is not None),
        **{"rows": rows, "e": e, "f": f, "block": BLOCK, "width": width, "sums": _sums(width)},
        "scale": repr(float(scale)),
        "least": LEAST_KEYS,
        "work": PARALLEL_WORK,
        "threads": config.threads or "omp_get_max_threads()",
        "fixed": config.threads or 0,
    }
    name = f"dm_attend_{digest(_TEXT, repr(sorted(facts.items())))[:12]}"
    source = _TEXT.format(name=name, **facts)
    types = tuple([_TYPES[ref.dtype] for ref in (query, query, value, mask, query) if ref is not None])
    return CFunction(name, source, types, frozenset({width, 8, 4}), sizes=True)

"""The C++ of a matrix product of few rows: blocks of rows of the weights go side by side, and each block is
multiplied with all rows of x while it is in a core's own cache. How many rows there are is known at the call.
Weights that are stored the other way have the loops of columns_cpp.py.

A library copies the weights into an order of its own first, which costs more than the products of few rows.

>>> own = kernel(step)   # None: another call, or the library's; else the call asks `own.condition`
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch

from ..base.cache import digest
from ..base.config import config
from ..graph.sizes import Dim, Size, hint, known
from ..graph.spec import aten
from ..lower.program import BufRef, ExternStep
from ..lower.row_products import MOST_BYTES
from . import columns_cpp
from .cpp import CFunction
from .cpp_kernel import PARALLEL_WORK, machine_width

LEAST = 1 << 16  # weights
# The most rows, by type: beyond, a library's order of the weights pays.
MOST = {torch.float32: 24, torch.bfloat16: 12, torch.float16: 32}
_TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "f16"}
_BYTES = {torch.int8: "i8", torch.uint8: "u8"}

_TEXT = """
namespace {{ namespace {name}_ {{
typedef F{width} V; typedef {kind} T; typedef {weight} U; // of x and of the weights
enum {{W={width}, ROWS=4, MOST={most}, STRIP=64}};  // rows of weights and of x in registers
#define WHOLE _Pragma("GCC unroll 16")
#if defined(__AVX512BF16__) && {width}==16
enum {{DOTS=__is_same(T,bf16)}};
typedef short Q __attribute__((vector_size(64)));
INL Q pairs(const void*p){{
 typedef short U __attribute__((vector_size(64),aligned(2),may_alias)); return *(const U*)p; }}
INL Q converted(V low,V high){{ Q r; asm("vcvtne2ps2bf16 %2,%1,%0":"=v"(r):"v"(high),"v"(low)); return r; }}
INL V dots(V a,Q x,Q y){{ asm("vdpbf16ps %2,%1,%0":"+v"(a):"v"(x),"v"(y)); return a; }}
#else
enum {{DOTS=0}};
struct Q {{}};
INL Q pairs(const void*){{ return Q(); }}
INL Q converted(V,V){{ return Q(); }}
INL V dots(V a,Q,Q){{ return a; }}
#endif
INL Q weights(const U*w){{ if constexpr(__is_same(U,T)) return pairs(w);
 else return converted(ld<V>(w),ld<V>(w+W)); }}
// R rows of weights times M rows of x. next: bytes to a place that is fetched on the way; 0: none.
template<int R,int M> static void block(const U*w,i64 ws,const T*x,i64 xs,const T*bias,i64 bs,T*out,i64 os,
 i64 k,i64 next){{
 enum {{S=DOTS?2*W:W}}; V total[R][M]={{}}; float rest[R][M]={{}}; i64 e=0;
 while(e+S<=k){{ V a[R][M]={{}}; const i64 stop=e+STRIP*S<k?e+STRIP*S:k;
  for(;e+S<=stop;e+=S){{
   if(next) WHOLE for(int r=0;r<R;r++) __builtin_prefetch((const char*)(w+r*ws+e)+next,0,2);
   if constexpr(DOTS){{ Q y[R]; WHOLE for(int r=0;r<R;r++) y[r]=weights(w+r*ws+e);
    WHOLE for(int m=0;m<M;m++){{ const Q z=pairs(x+m*xs+e);
     WHOLE for(int r=0;r<R;r++) a[r][m]=dots(a[r][m],y[r],z); }}
   }} else {{ V y[R]; WHOLE for(int r=0;r<R;r++) y[r]=ld<V>(w+r*ws+e);
    WHOLE for(int m=0;m<M;m++){{ const V z=ld<V>(x+m*xs+e);
     WHOLE for(int r=0;r<R;r++) a[r][m]=fma_(y[r],z,a[r][m]); }} }} }}
  WHOLE for(int r=0;r<R;r++) WHOLE for(int m=0;m<M;m++) total[r][m]+=a[r][m]; }}
 for(;e<k;e++) for(int r=0;r<R;r++) for(int m=0;m<M;m++)
  rest[r][m]=fma_(ld<float>(w+r*ws+e),ld<float>(x+m*xs+e),rest[r][m]);
 for(int r=0;r<R;r++) for(int m=0;m<M;m++)
  st<T>(out+m*os+r,hsum(total[r][m])+rest[r][m]+(bias?ld<float>(bias+r*bs):0.f)); }}
template<int R> static void rows(const U*w,i64 ws,const T*x,i64 xs,const T*bias,i64 bs,T*out,i64 os,
 i64 k,i64 m,i64 next){{
 const i64 turns=(m+MOST-1)/MOST,each=turns?(m+turns-1)/turns:0;
 for(i64 i=0,n;i<m;i+=n){{ const T*a=x+i*xs; T*o=out+i*os; const i64 ahead=i?0:next; n=m-i<each?m-i:each;
  if(n==4) block<R,4>(w,ws,a,xs,bias,bs,o,os,k,ahead);
  else if(n==3) block<R,3>(w,ws,a,xs,bias,bs,o,os,k,ahead);
  else if(n==2) block<R,2>(w,ws,a,xs,bias,bs,o,os,k,ahead);
  else block<R,1>(w,ws,a,xs,bias,bs,o,os,k,ahead); }} }}
#undef WHOLE
}} }}
// Numbers: rows of x, their length, rows of weights; offset and step of x, weights, bias and result.
extern "C" void {name}(void**p,const i64*n){{ using namespace {name}_;
 const i64 m=n[0],k=n[1],count=n[2],tasks=(count+ROWS-1)/ROWS,xs=n[4],ws=n[6],bs=n[8],os=n[10];
 const T*x=(const T*)p[0]+n[3],*bias={biased}?(const T*)p[2]+n[7]:0; const U*w=(const U*)p[1]+n[5];
 T*out=(T*)p[{result}]+n[9];
 over(tasks>1&&m*k*count>{work},tasks,{fixed},[=](i64 first_,i64 last_){{
  for(i64 t=first_;t<last_;t++){{ const i64 r=t*ROWS; const T*b=bias?bias+r*bs:0;
   if(r+ROWS<=count) rows<ROWS>(w+r*ws,ws,x,xs,b,bs,out+r,os,k,m,ROWS*ws*(i64)sizeof(U));
   else for(i64 i=r;i<count;i++){{ const T*c=bias?bias+i*bs:0;
    rows<1>(w+i*ws,ws,x,xs,c,bs,out+i,os,k,m,0); }} }} }}); }}
"""


@dataclass(frozen=True)
class Own:
    """A function, the buffers and numbers that it is given, and when the call takes it: "" is always."""

    function: CFunction
    buffers: list[str]
    numbers: list[Dim]
    condition: str = ""


def kernel(step: ExternStep, result: BufRef) -> Own | None:
    """The function of a product, if it may have few rows; result: the memory that it is written into."""
    if step.kwargs or step.out_variant is None:
        return None
    if step.target is torch.ops.dynamotor.byte_product.default:
        x, w, *bias = [ref for ref in step.args if ref is not None]
    elif step.target in (aten.mm.default, aten.addmm.default):
        *bias, x, w = step.args
    else:
        return None
    rows, columns = x.shape[0], w.stride[0] != 1
    most = (MOST_BYTES if w.dtype in _BYTES else MOST).get(x.dtype, 0)
    if not _is_few(rows, most) or not _fits(x, w, bias, result):
        return None
    numbers: list[Dim] = [
        rows,
        x.shape[1],
        w.shape[1],
        x.offset,
        x.stride[0],
        w.offset,
        w.stride[not columns],
    ]
    numbers += [bias[0].offset, bias[0].stride[0]] if bias else [0, 0]
    numbers += [result.offset, result.stride[0]]
    names = [ref.name for ref in (x, w, *bias, result)]
    condition = "" if known(">=", most - rows) else f"0 < {rows} <= {most}"
    text = columns_cpp.TEXT if columns else _TEXT
    return Own(_function(text, x.dtype, w.dtype, bool(bias)), names, numbers, condition)


def _is_few(rows: Dim, most: int) -> bool:
    """Whether a call may have few rows."""
    if type(rows) is not Size:
        return 0 < rows <= most
    return most > 0 and not known(">=", rows - most - 1)


def _fits(x: BufRef, w: BufRef, bias: list[BufRef], result: BufRef) -> bool:
    """Whether rows, or columns, of the weights are contiguous, and the weights worth it."""
    if {ref.dtype for ref in (x, *bias, result)} != {x.dtype} or w.dtype not in (x.dtype, *_BYTES):
        return False
    if any(type(n) is Size for n in (*w.shape, x.stride[1], *w.stride, result.stride[1])):
        return False
    if hint(w.shape[0]) * hint(w.shape[1]) < LEAST or any(len(ref.shape) != 1 for ref in bias):
        return False
    along = w.stride[0] == 1 or w.stride[1] == 1 and w.dtype == x.dtype
    return along and x.stride[1] == 1 and result.stride[1] == 1


def _function(text: str, dtype: torch.dtype, weights: torch.dtype, biased: bool) -> CFunction:
    width = machine_width()
    facts = {
        "kind": _TYPES[dtype],
        "weight": {**_TYPES, **_BYTES}[weights],
        "width": width,
        "most": 4 if width == 16 or platform.machine() == "aarch64" else 2,  # with 32 registers, with 16
        "biased": int(biased),
        "result": 2 + biased,
        "work": PARALLEL_WORK,
        "fixed": config.threads or 0,
    }
    name = f"dm_product_{digest(text, repr(sorted(facts.items())))[:12]}"
    types = (_TYPES[dtype], str(facts["weight"]), *[_TYPES[dtype]] * (1 + biased))
    return CFunction(name, text.format(name=name, **facts), types, frozenset({width}), sizes=True)

"""The C++ of a product of few rows with weights whose columns are side by side, as those of transformers'
Conv1D: a few rows of weights at a time are multiplied with their numbers of x and added to the sums of all
columns.

A library's kernels for halves copy such weights into another order first, which takes several times as long
as reading them.
"""

from __future__ import annotations

TEXT = """
namespace {{ namespace {name}_ {{
typedef F{width} V; typedef {kind} T;
// Rows of weights, columns and rows of x that go together.
enum {{W={width}, DEEP=8, WIDE=1024, MOST=4, LINE=64, STEP=LINE/sizeof(T)}};
#define WHOLE _Pragma("GCC unroll 16")
// D rows of weights times their numbers of M rows of x, added to sums; those of the next rows are fetched.
template<int D,int M> static void add(const T*w,i64 ws,const T*x,i64 xs,float*sums,i64 columns){{
 float c[M][D]; for(int m=0;m<M;m++) for(int d=0;d<D;d++) c[m][d]=ld<float>(x+m*xs+d);
 i64 n=0;
 for(;n+STEP<=columns;n+=STEP){{
  WHOLE for(int d=0;d<D;d++) __builtin_prefetch(w+(d+D)*ws+n,0,2);
  for(int part=0;part<STEP;part+=W){{ V y[D]; WHOLE for(int d=0;d<D;d++) y[d]=ld<V>(w+d*ws+n+part);
   WHOLE for(int m=0;m<M;m++){{ float*s=sums+m*WIDE+n+part; V a=ld<V>(s);
    WHOLE for(int d=0;d<D;d++) a=fma_(y[d],bc<V>(c[m][d]),a);
    st<float>(s,a); }} }} }}
 for(;n<columns;n++) for(int m=0;m<M;m++) for(int d=0;d<D;d++)
  sums[m*WIDE+n]=fma_(ld<float>(w+d*ws+n),c[m][d],sums[m*WIDE+n]); }}
template<int D> static void add_to(const T*w,i64 ws,const T*x,i64 xs,i64 rows,float*sums,i64 columns){{
 for(i64 m=0;m<rows;m+=MOST){{ const T*a=x+m*xs; float*s=sums+m*WIDE; const i64 left=rows-m;
  if(left>3) add<D,4>(w,ws,a,xs,s,columns); else if(left==3) add<D,3>(w,ws,a,xs,s,columns);
  else if(left==2) add<D,2>(w,ws,a,xs,s,columns); else add<D,1>(w,ws,a,xs,s,columns); }} }}
#undef WHOLE
}} }}
// Numbers: rows of x, their length, columns of weights; offset and step of x, weights, bias and result.
extern "C" void {name}(void**p,const i64*n){{ using namespace {name}_;
 const i64 rows=n[0],k=n[1],count=n[2],tasks=(count+LINE-1)/LINE,xs=n[4],ws=n[6],bs=n[8],os=n[10];
 const T*x=(const T*)p[0]+n[3],*bias={biased}?(const T*)p[2]+n[7]:0,*w=(const T*)p[1]+n[5];
 T*out=(T*)p[{result}]+n[9];
 over(tasks>1&&rows*k*count>{work},tasks,{fixed},[=](i64 first_,i64 last_){{
  float*sums=(float*)row_room(rows*WIDE*sizeof(float)); const i64 end=min(last_*LINE,count);
  for(i64 at=first_*LINE;at<end;at+=WIDE){{ const i64 columns=min(end-at,(i64)WIDE); i64 d=0;
   for(i64 m=0;m<rows;m++) for(i64 i=0;i<columns;i++) sums[m*WIDE+i]=0.f;
   for(;d+DEEP<=k;d+=DEEP) add_to<DEEP>(w+d*ws+at,ws,x+d,xs,rows,sums,columns);
   for(;d<k;d++) add_to<1>(w+d*ws+at,ws,x+d,xs,rows,sums,columns);
   for(i64 m=0;m<rows;m++) for(i64 i=0;i<columns;i++)
    st<T>(out+m*os+at+i,sums[m*WIDE+i]+(bias?ld<float>(bias+(at+i)*bs):0.f)); }} }}); }}
"""

# ruff: noqa
"""More Python programs, odd ones included: what cannot be captured breaks the graph and still gives eager's result."""

import abc, bisect, collections, contextlib, copy, dataclasses, enum, functools, heapq, itertools, json, math, operator, re, string, types, typing
import torch
from torch import nn
PROGRAMS={}
def program(f): PROGRAMS[f.__name__]=f; return f
class Shape(abc.ABC):
    registry = []
    def __init_subclass__(cls, **kw):
        super().__init_subclass__(**kw)
        Shape.registry.append(cls.__name__)
    @abc.abstractmethod
    def area(self): ...
    @property
    def scale(self): return self._scale
    @scale.setter
    def scale(self, v): self._scale = v * 2
    @scale.deleter
    def scale(self): del self._scale
class Sq(Shape):
    def __init__(self, s): self.s = s; self.scale = s
    def area(self): return self.s ** 2 * self.scale
@functools.total_ordering
class Ord:
    def __init__(self, v): self.v = v
    def __eq__(self, o): return self.v == o.v
    def __lt__(self, o): return self.v < o.v
    def __hash__(self): return hash(self.v)
    def __repr__(self): return f"Ord({self.v})"
class Perm(enum.Flag):
    R = 1; W = 2
class IE(enum.IntEnum):
    A = 1; B = 2
@dataclasses.dataclass(order=True)
class D:
    a: int
    b: list = dataclasses.field(default_factory=list, compare=False)
    c: int = dataclasses.field(init=False, default=3)
    d: dataclasses.InitVar[int] = 5
    def __post_init__(self, d): self.c = self.c + d
@dataclasses.dataclass
class E(D):
    e: float = 1.0
class Acc:
    def __init__(self): self.t = []
    def __iadd__(self, o): self.t.append(o); return self
    def __getitem__(self, k): return k
    def __matmul__(self, o): return ("mm", o)
    def __neg__(self): return "neg"
    def __int__(self): return 7
    def __index__(self): return 1
    def __float__(self): return 2.5
    def __abs__(self): return 9
    def __round__(self, n=None): return 4
    def __str__(self): return "acc"
    def __format__(self, spec): return f"<{spec}>"
    def __len__(self): return 3
    def __reversed__(self): return iter([3,2,1])
    def __delitem__(self, k): self.t.append(("del",k))
    def __setitem__(self, k, v): self.t.append((k,v))
    def __divmod__(self, o): return "dm"
    def __rpow__(self, o): return "rp"
    def __bool__(self): return False
@functools.singledispatch
def sd(x): return "default"
@sd.register
def _(x: int): return "int"
@sd.register(list)
def _(x): return "list"
class WithAttr:
    shared = {"n": 0}
    items = []
    def bump(self): self.shared["n"] += 1; self.items.append(self.shared["n"]); return self.shared["n"]
@program
def abstract(x): s=Sq(x); s.scale=3; a=s.area(); del s.scale; return a, hasattr(s,"scale"), isinstance(s, Shape), Shape.registry
@program
def ordering(x): a,b=Ord(1),Ord(2); return x, a<b, a<=b, a>b, a>=b, max([a,b]).v, sorted([b,a])[0].v, a!=b, {a:1}[Ord(1)], repr([a])
@program
def flags(x): return x, Perm.R|Perm.W, Perm.R in (Perm.R|Perm.W), IE.A+1, IE.B>IE.A, x*IE.B, list(IE), Perm(3), IE["A"] is IE.A, isinstance(IE.A,int)
@program
def dcs(x): p=D(1,d=7); q=E(2,[x],e=2.0); return p.c,q.c,q.e,p<D(2),p==D(1),dataclasses.astuple(D(4)),[f.name for f in dataclasses.fields(q)],dataclasses.is_dataclass(p),repr(D(3)), q
@program
def operators(x):
    a=Acc(); a+=x; a+=2
    del a[1:2]; a[3]=4
    return len(a.t), a[1,2:3,...], a@3, -a, int(a), [10,20,30][a], float(a), abs(a), round(a), str(a), f"{a:xx}", len(a), list(reversed(a)), divmod(a,2), 2**a, (1 if a else 0), a.t[2:], not a
@program
def sdispatch(x): return x, sd(1), sd([]), sd("s")
@program
def class_state(x): w=WithAttr(); w.shared["n"]=0; w.items.clear(); return x+w.bump(), w.bump(), list(w.items)
@program
def chained_maps(x): c=collections.Counter("hello"); m=collections.ChainMap({"a":1},{"b":2}); return x, c["l"], c.most_common(1), m["b"]
@program
def bisects(x): return x, bisect.bisect_left([1,2,3],2), math.prod([1,2,3]), math.isclose(1.0,1.0), math.gcd(4,6), int.from_bytes(b"ab","big"), math.comb(5,2), float.fromhex("0x1p0")
@program
def heaps(x): h=[3,1,2]; heapq.heapify(h); return x, heapq.heappop(h), h
@program
def regex(x): m=re.match(r"(\w+)-(\d+)","ab-12"); return x, m.group(1), int(m.group(2)), re.sub("a","b","banana")
@program
def jsons(x): return x, json.dumps({"a":[1,2]}), json.loads("[1]")
@program
def genexprs(x): return sum(x*i for i in range(3)), max((i*2 for i in range(3)), default=0), ",".join(str(i) for i in range(3)), dict((str(i),i) for i in range(2)), set(i%2 for i in range(5))=={0,1}, tuple(x+i for i in range(2))
@program
def nested_comp(x):
    k=2
    return [[x*i*k for i in range(j)] for j in range(3)], {i:{j for j in range(i)} for i in range(3)}, [f() for f in [lambda i=i:i*k for i in range(3)]]
@program
def shortcircuit(x):
    log=[]
    def t(v): log.append(v); return v
    r=any(t(v) for v in [0,1,2]), all(t(v) for v in [1,0,3]), t(0) and t(5), t(6) or t(7)
    return x,r,log
@program
def zips(x):
    try:
        list(zip([1],[1,2],strict=True)); e=None
    except ValueError as er: e=str(er)
    return x,e,list(zip(*[(1,2),(3,4)])), list(enumerate("ab",5)), list(reversed(range(4))), list(map(max,[1,5],[3,2]))
@program
def retfin(x):
    def f():
        for i in range(3):
            try:
                if i==1: return i
            finally:
                if i==1: return "f"
    return x,f()
@program
def send_protocol(x):
    def avg():
        t=0;n=0;a=None
        while True:
            v=yield a
            if v is None: return (t,n)
            t+=v;n+=1;a=t/n
    def outer(res):
        while True:
            r=yield from avg(); res.append(r)
    res=[];g=outer(res);next(g)
    a=[g.send(v) for v in (10,20,None,5,None)]
    return x,a,res
@program
def throwing(x):
    def g():
        while True:
            try: yield 1
            except ValueError: yield "v"
    it=g(); next(it); a=it.throw(ValueError("q")); b=next(it); it.close()
    try: next(it)
    except StopIteration: c="stop"
    return x,a,b,c
@program
def string_ops(x):
    s="Hello World"
    return x, s.lower().title().swapcase().center(20,"*"), s.replace("l","L",1), s.partition(" "), s.rsplit("o",1), s.find("W"), s.encode().hex(), "a\tb".expandtabs(4), s.translate(str.maketrans("lo","01")), f"{s!a:^20}", f"{3.14159:.2f} {1000000:,} {255:#x} {0.5:%}", "{0[a]} {1.real}".format({"a":1},2), s[::-1], " x ".strip(), "a".ljust(3,".")+"|", s.isalpha(), "%05.1f|%-4s|%x"%(2.5,"q",255)
@program
def attr_errors(x):
    out=[]
    for f in (lambda: x.foo, lambda: (1).foo, lambda: Acc().foo, lambda: None.foo, lambda: {}["a"], lambda: [][1], lambda: 1/0, lambda: int("a"), lambda: "a"+1, lambda: len(5), lambda: undefined_name, lambda: (1,)[2], lambda: next(iter([])), lambda: dict([1]), lambda: [].remove(1), lambda: {1}.remove(2), lambda: [1].index(4), lambda: math.sqrt(-1), lambda: min([]), lambda: Acc(1), lambda: Shape()):
        try: f(); out.append(None)
        except Exception as e: out.append((type(e).__name__, len(e.args)))
    return x,out
@program
def exception_chain(x):
    try:
        try: 1/0
        except ZeroDivisionError as e: raise ValueError("b") from e
    except ValueError as e: r=(type(e.__cause__).__name__, e.__suppress_context__ if False else None)
    try:
        try: 1/0
        except ZeroDivisionError: raise KeyError("c")
    except KeyError as e: r2=type(e.__context__).__name__
    try:
        try: raise KeyError(1)
        finally: z=1
    except KeyError as e: r3=e.args
    return x,r,r2,r3
@program
def mutable_default(x):
    def f(a, acc=[]): acc.append(a); return len(acc)
    return f(x), f(x), f(x,[])
@program
def list_edge(x):
    a=list(range(10)); a[2:5]=[9]; a[::2]=[0]*len(a[::2]); del a[-2:]; b=a[:]; b.insert(100,5); b.insert(-1,7)
    return x,a,b,[1,2]*0,[[]]*2,a==b,a<b,[1,[2,[3]]]==[1,[2,[3]]],list("abc"),sorted([3,1],reverse=True), [*range(3),*"ab"], a.index(0,1)
@program
def dict_edge(x):
    d={i:i*i for i in range(5)}; d.pop(3); it=iter(d.items()); next(it); it=list(it)
    e=dict(a=1,**{"b":2}); e|={"a":5}; f={**e,"a":6}
    try:
        for k in list(d): d[k+100]=1
        for k in d: d[k+1000]=1; break
        msg=len(d)
    except RuntimeError as er: msg=str(er)
    return x,it,e,f,d.keys()-{0},list(d.values()),msg,sorted(d),dict([("a",1)]),e.items()>={("a",5)}, {1:2}=={1.0:2}, list({True:1,1:2}.items())
@program
def typing_stuff(x):
    T=typing.Optional[int]
    return x, isinstance([],collections.abc.Sequence), isinstance({},collections.abc.Mapping), isinstance(x,typing.Hashable), callable(print), typing.get_origin(typing.List[int]) is list, isinstance(3,(float,int|str)), issubclass(Sq,Shape)
@program
def partials(x):
    class_=functools.partial(D,1); m=functools.partialmethod
    f=functools.partial(lambda a,b,c=0:(a,b,c),1,c=5)
    return x,f(2),f(2,c=7),class_(d=0).c,f.func.__name__,f.args,f.keywords
@program
def nn_things(x):
    l=nn.ModuleList([nn.ReLU(),nn.Tanh()]); 
    return [m(x) for m in HELDL], len(HELDL), HELDL[-1](x), [type(m).__name__ for m in HELDL[:1]], HELDD["a"](x), list(HELDD), "a" in HELDD, [n for n,_ in HELDD.named_children()], sum(p.numel() for p in HELDD.parameters())
HELDL=nn.ModuleList([nn.ReLU(),nn.Tanh()]); HELDD=nn.ModuleDict({"a":nn.Linear(3,3).double()})
@program
def sns(x): n=types.SimpleNamespace(a=1,b=x); n.c=n.a+1; return n.c, n.b, vars(n)["a"]
@program
def exits(x):
    log=[]
    @contextlib.contextmanager
    def cm(n):
        log.append(("in",n))
        try: yield n
        finally: log.append(("out",n))
    with contextlib.ExitStack() as st:
        for i in range(2): st.enter_context(cm(i))
        st.callback(log.append,"cb")
        log.append("body")
    with cm(5) as a, cm(6) as b:
        log.append(a+b)
    for i in range(2):
        with cm(i):
            if i==0: continue
            break
    def f():
        with cm("ret"): return 1
    return x,log,f()
@program
def closures_deep(x):
    def mk():
        n=0
        def inc(by=1):
            nonlocal n
            n+=by
            def get(): return n
            return get
        return inc
    i=mk(); g=i(); h=i(5)
    return x,g(),h(),i.__closure__[0].cell_contents, i.__code__.co_name, g.__qualname__
@program
def cls_in_fn(x):
    class Local:
        k=3
        def __init__(self,v): self.v=v
        def go(self): return self.v*self.k
    return Local(x).go()
@program
def star_index(x): t=(slice(0,1),0); return x[t], x[(*t,)], x[..., :1], x[None].shape, x[:, [0,1]]
@program
def bytesio(x):
    import io
    b=io.StringIO(); b.write("a"); return x, b.getvalue()
@program
def template(x): return x, string.Template("$a").substitute(a=1), string.ascii_lowercase[:3]
@program
def complexnum(x): return x, (1+2j)*(3-1j), abs(3+4j), complex("1+2j"), round(-2.5), round(3.14159,2), 10**20, -7//2, 7%-3, 0.1+0.2, 1e300*1e10, True+True, ~True, 5.0.is_integer(), (5).bit_count()
@program
def while_else(x):
    n=3; out=[]
    while n:
        n-=1
        if n==5: break
    else: out.append("e")
    return x,out
@program
def unpack_nested(x):
    (a,*b),c,[d,(e,)]=[(1,2,3),4,(5,[6])]
    for i,(j,*k) in [(1,(2,3)),(4,(5,))]: b.append((i,j,k))
    return x,a,b,c,d,e
@program
def global_mut(x):
    GL.append(1); GD["k"]=x; r=len(GL); GL.clear(); return x,r,GD["k"]
GL=[];GD={}
@program
def copy_module_attr(x): return x*math.tau, math.inf>1, torch.pi, torch.float32.is_floating_point, torch.Size([1,2])+(3,), torch.Size([2,3]).numel(), torch.finfo(torch.float32).eps, x.dtype==torch.float64, str(x.dtype), x.device.type
@program
def what_library_iterators_are(x):
    made = itertools.chain(x, x), itertools.islice(x, 1), itertools.count(), itertools.repeat(1), itertools.accumulate([1, 2])
    kinds = [(type(i), hasattr(i, "send"), isinstance(i, types.GeneratorType), next(i) is not None) for i in made]
    try: made[0].close()
    except AttributeError as e: kinds.append(type(e))
    return x, kinds, (type(v for v in kinds), itertools.product([1], [2, 3]))[0]

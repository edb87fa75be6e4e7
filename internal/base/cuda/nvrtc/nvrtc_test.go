//go:build cuda

package nvrtc

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
)

// local is the folder of scripts/cuda-sdk.
const local = "../../../../.cuda/lib"

func open(t testing.TB) *Compiler {
	t.Helper()
	c, err := Open(local)
	if err != nil {
		t.Fatalf("%v\n(scripts/cuda-sdk fetches it)", err)
	}
	return c
}

const kernel = `
#include "scale.cuh"
extern "C" __global__ void scale(float *x, float by, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] = scaled(x[i], by) + PLUS;
}
`

var headers = map[string][]byte{"scale.cuh": []byte("__device__ float scaled(float x, float by) { return x * by; }\n")}

func options(arch string) []string {
	return []string{"--gpu-architecture=" + arch, "--ptxas-options=-v", "-DPLUS=1"}
}

func TestCompile(t *testing.T) {
	c := open(t)
	t.Logf("NVRTC %s at %s", c.Version(), c.Path())
	for _, arch := range []string{"sm_80", "sm_90a", "sm_100a"} {
		cubin, log, err := c.Compile("scale.cu", []byte(kernel), headers, options(arch))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.HasPrefix(cubin, []byte("\x7fELF")) {
			t.Errorf("%s: the cubin begins with %q", arch, cubin[:4])
		}
		if !strings.Contains(log, "Compiling entry function 'scale'") {
			t.Errorf("%s: the log %q", arch, log)
		}
	}
}

func TestErrorsCarryTheLog(t *testing.T) {
	c := open(t)
	for name, opts := range map[string][]string{
		"identifier \"wrong\" is undefined": options("sm_90a"),
		"unrecognized option":               append(options("sm_90a"), "--no-such-thing"),
		"real one":                          options("compute_90a"),
	} {
		src := "extern \"C\" __global__ void f() {}"
		if strings.Contains(name, "wrong") {
			src = "extern \"C\" __global__ void f(int *x) { *x = wrong; }"
		}
		_, _, err := c.Compile("bad.cu", []byte(src), nil, opts)
		var e *Error
		if !errors.As(err, &e) || !strings.Contains(err.Error(), "bad.cu") || !strings.Contains(err.Error(), name) {
			t.Errorf("error %v, want one about %q that names bad.cu", err, name)
		}
	}
	if _, err := Open(); err != nil && !strings.Contains(err.Error(), "LD_LIBRARY_PATH") {
		t.Errorf("%v does not say what to do", err)
	}
}

func compile(t *testing.T, c *Cache, opts ...string) []byte {
	t.Helper()
	return must.Have(c.Compile("scale.cu", []byte(kernel), headers, append(options("sm_90a"), opts...)))
}

func TestCacheCompilesOnce(t *testing.T) {
	compiler, dir := open(t), filepath.Join(t.TempDir(), "a", "b")
	first := &Cache{Compiler: compiler, Dir: dir}
	want := compile(t, first)
	compile(t, first, "-DEXTRA")
	if first.Compiled() != 2 {
		t.Errorf("two programs were compiled %d times", first.Compiled())
	}
	second := &Cache{Compiler: compiler, Dir: dir}
	if got := compile(t, second); !bytes.Equal(got, want) || second.Compiled() != 0 {
		t.Errorf("a second start compiled %d programs", second.Compiled())
	}
	if files, _ := os.ReadDir(dir); len(files) != 2 {
		t.Errorf("two programs left %v behind", files)
	}
}

func TestCacheDistrustsDamage(t *testing.T) {
	compiler, dir := open(t), t.TempDir()
	want := compile(t, &Cache{Compiler: compiler, Dir: dir})
	entry := filepath.Join(dir, Key(compiler.Version(), "scale.cu", []byte(kernel), headers, options("sm_90a"))+".cubin")
	whole := must.Have(os.ReadFile(entry))
	flipped := bytes.Clone(whole)
	flipped[len(flipped)/2] ^= 1
	for name, data := range map[string][]byte{"empty": nil, "cut": whole[:len(whole)-1], "flipped": flipped,
		"header only": whole[:len(magic)+3]} {
		must.Do(t, os.WriteFile(entry, data, 0o644))
		c := &Cache{Compiler: compiler, Dir: dir}
		if got := compile(t, c); !bytes.Equal(got, want) || c.Compiled() != 1 {
			t.Errorf("%s entry: compiled %d programs, the right cubin: %t", name, c.Compiled(), bytes.Equal(got, want))
		}
		if now, _ := os.ReadFile(entry); !bytes.Equal(now, whole) {
			t.Errorf("%s entry was not repaired", name)
		}
	}
}

func TestCacheIsShared(t *testing.T) {
	compiler, dir := open(t), t.TempDir()
	var all [6]Cache // one for each simulated process
	var wg sync.WaitGroup
	for i := range all {
		all[i] = Cache{Compiler: compiler, Dir: dir}
		wg.Go(func() { compile(t, &all[i]) })
	}
	wg.Wait()
	n := 0
	for i := range all {
		n += all[i].Compiled()
		must.Do(t, all[i].Fault())
	}
	if n != 1 {
		t.Errorf("%d users of one folder compiled one program %d times", len(all), n)
	}
}

func TestCacheWorksWithoutItsFolder(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	must.Do(t, os.WriteFile(file, nil, 0o644))
	c := &Cache{Compiler: open(t), Dir: filepath.Join(file, "below")}
	compile(t, c)
	if c.Fault() == nil || c.Compiled() != 1 {
		t.Errorf("fault %v, compiled %d", c.Fault(), c.Compiled())
	}
}

func TestKeyTellsApart(t *testing.T) {
	seen := map[string]string{}
	add := func(what, key string) {
		if other, ok := seen[key]; ok {
			t.Errorf("%s and %s have one key", what, other)
		}
		seen[key] = what
	}
	v, n, s, h, o := "13.0", "a.cu", []byte("x"), map[string][]byte{"h": []byte("1"), "i": nil}, []string{"-O", "-v"}
	add("the base", Key(v, n, s, h, o))
	add("another version", Key("13.1", n, s, h, o))
	add("another name", Key(v, "b.cu", s, h, o))
	add("another source", Key(v, n, []byte("y"), h, o))
	add("another header", Key(v, n, s, map[string][]byte{"h": []byte("2"), "i": nil}, o))
	add("fewer headers", Key(v, n, s, map[string][]byte{"h": []byte("1")}, o))
	add("another option", Key(v, n, s, h, []string{"-O", "-w"}))
	add("joined options", Key(v, n, s, h, []string{"-O-v"}))
	add("an option that looks like a header",
		Key(v, n, s, map[string][]byte{"h": []byte("1")}, append([]string{"i", ""}, o...)))
}

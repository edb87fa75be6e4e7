//go:build cuda

package driver_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"gorgonia.org/cu"

	"github.com/cprun/cprun/internal/base/cuda/driver"
	"github.com/cprun/cprun/internal/base/must"
)

// TestMain runs the binary again with a fake libcuda.so.1 ahead of any installed one. If the binary reaches TestMain,
// gorgonia.org/cu has let it start.
func TestMain(m *testing.M) {
	if os.Getenv("CPRUN_TEST_DRIVER") == "" {
		os.Exit(m.Run())
	}
	report()
}

// report prints a program's view of its driver.
func report() {
	_, early := cu.NumDevices()
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() { driver.Load() })
	}
	group.Wait()
	err := driver.Load()
	version, versionErr := driver.Version()
	n, countErr := cu.NumDevices()
	fmt.Printf("before: %v\n", early)
	fmt.Printf("load: %v\n", err)
	fmt.Printf("absent: %v, no device: %v\n", errors.Is(err, driver.ErrAbsent), errors.Is(err, driver.ErrNoDevice))
	fmt.Printf("version: %s, %v\n", version, versionErr)
	fmt.Printf("count: %d, %v\n", n, countErr)
	if err == nil {
		// More arguments than fit in registers.
		err = cu.Function{}.Launch(2, 3, 4, 5, 6, 7, 8, cu.Stream{}, nil)
		fmt.Printf("launch: %v\n", err)
	}
}

// with returns the output of report with libcuda.so.1 in the folder.
func with(t *testing.T, dir string) string {
	t.Helper()
	run := exec.Command(os.Args[0])
	run.Env = append(os.Environ(), "CPRUN_TEST_DRIVER=1", "LD_LIBRARY_PATH="+dir)
	out, err := run.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return string(out)
}

// made compiles a libcuda.so.1 with the written functions and returns its folder. Named functions that are not written
// succeed and do nothing.
func made(t *testing.T, written string, names ...string) string {
	t.Helper()
	var source strings.Builder
	source.WriteString("#include <cuda.h>\n#include <stddef.h>\n" + written)
	for _, name := range names {
		if !strings.Contains(written, name+"(") {
			fmt.Fprintf(&source, "int stand_in_%s(void) __asm__(\"%s\");\nint stand_in_%[1]s(void) { return 0; }\n", name, name)
		}
	}
	dir := t.TempDir()
	args := append(strings.Fields(os.Getenv("CGO_CFLAGS")), "-shared", "-fPIC", "-w", "-x", "c", "-", "-o",
		filepath.Join(dir, "libcuda.so.1"))
	compile := exec.Command("cc", args...)
	compile.Stdin = strings.NewReader(source.String())
	if out, err := compile.CombinedOutput(); err != nil {
		t.Fatalf("cc: %v\n%s", err, out)
	}
	return dir
}

// names returns the functions of a list in the header.
func names(t *testing.T, list string) []string {
	t.Helper()
	here := must.Have(os.Getwd())
	args := append(strings.Fields(os.Getenv("CGO_CFLAGS")), "-E", "-P", "-x", "c", "-")
	expand := exec.Command("cc", args...)
	expand.Stdin = strings.NewReader(fmt.Sprintf("#include <cuda.h>\n#include \"%s/functions.h\"\n"+
		"#define NAME(name) (found name)\n%s(NAME)\n", here, list))
	out, err := expand.Output()
	if err != nil {
		t.Fatalf("cc -E: %v", err)
	}
	var found []string
	for _, m := range regexp.MustCompile(`\(found (\w+)\)`).FindAllStringSubmatch(string(out), -1) {
		found = append(found, m[1])
	}
	if len(found) < 40 {
		t.Fatalf("%s: only %d functions", list, len(found))
	}
	return found
}

// contains checks that the report has the given lines.
func contains(t *testing.T, out string, want ...string) {
	t.Helper()
	for _, w := range want {
		if !strings.Contains(out, w) {
			t.Errorf("not said: %q\n%s", w, out)
		}
	}
}

const version = "CUresult cuDriverGetVersion(int *v) { *v = 11040; return 0; }\n"

func TestNoDriver(t *testing.T) {
	dir := t.TempDir()
	must.Do(t, os.WriteFile(filepath.Join(dir, "libcuda.so.1"), []byte("no library"), 0o644))
	out := with(t, dir)
	contains(t, out, "before: NotInitialized", "absent: true", "the NVIDIA driver is not on this machine (",
		"libcuda.so.1: ", "; install a driver for CUDA ", "count: 0, NotInitialized", "version: , the NVIDIA driver is not")
}

// A future driver may remove functions that cprun does not call, and no others.
func TestDrivers(t *testing.T) {
	needed := names(t, "CPRUN_DRIVER_NEEDED")
	old := slices.DeleteFunc(slices.Clone(needed), func(name string) bool {
		return name == "cuLaunchKernelEx" || name == "cuTensorMapEncodeTiled"
	})
	for name, c := range map[string]struct {
		written   string
		functions []string
		want      []string
	}{
		"old": {version, old, []string{"absent: false", "the NVIDIA driver, for CUDA 11.4, is too old: its libcuda.so.1 " +
			"has no cuLaunchKernelEx, cuTensorMapEncodeTiled; install a driver for CUDA ", "count: 0, NotInitialized"}},
		"empty": {"int nothing;\n", nil, []string{"the NVIDIA driver is too old: its libcuda.so.1 has no cuInit, "}},
		"no device": {version + "CUresult cuInit(unsigned flags) { return CUDA_ERROR_NO_DEVICE; }\n", needed,
			[]string{"absent: false, no device: true", "version: 11.4, <nil>"}},
		"failing": {version + `
CUresult cuInit(unsigned flags) { return CUDA_ERROR_SYSTEM_DRIVER_MISMATCH; }
CUresult cuGetErrorName(CUresult r, const char **s) {
  *s = r == 803 ? "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" : "?";
  return 0;
}
CUresult cuGetErrorString(CUresult r, const char **s) { *s = "system has unsupported display driver"; return 0; }
`, needed, []string{"absent: false, no device: false", "the NVIDIA driver does not start: cuInit: system has " +
			"unsupported display driver (CUDA_ERROR_SYSTEM_DRIVER_MISMATCH)"}},
		"new": {version, needed, []string{"load: <nil>", "launch: UnknownErrorCode:36"}},
	} {
		t.Run(name, func(t *testing.T) { contains(t, with(t, made(t, c.written, c.functions...)), c.want...) })
	}
}

// Calls reach the driver with all of their arguments, and the driver starts only once.
func TestDriver(t *testing.T) {
	out := with(t, made(t, version+`
static int starts;
CUresult cuInit(unsigned flags) { starts++; return 0; }
CUresult cuDeviceGetCount(int *n) { *n = 40 + starts; return 0; }
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
	unsigned shared, CUstream s, void **params, void **extra) {
	return gx == 2 && gy == 3 && gz == 4 && bx == 5 && by == 6 && bz == 7 && shared == 8 && !s && !extra
		? 0 : CUDA_ERROR_INVALID_VALUE;
}
`, append(names(t, "CPRUN_DRIVER_NEEDED"), "cuLaunchKernel")...))
	contains(t, out, "before: NotInitialized", "load: <nil>", "count: 41, <nil>", "version: 11.4, <nil>", "launch: <nil>")
}

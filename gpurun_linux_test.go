package cprun_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// binary stands for a test binary: it lists tests, or runs those of the pattern. It appends a word to a file if another
// process runs, and the pattern at the end.
const binary = `#!/bin/sh
[ "$1" = -test.list ] && exec cat tests
mkdir busy 2>&- || echo overlap >>order
trap 'rmdir busy 2>&-; echo "$5" >>order' EXIT
case $5 in
*TestFails*) echo '--- FAIL: TestFails (0.00s)'; exit 1 ;;
*TestPanics*) echo 'panic: broken'; exit 2 ;;
*TestEnds*) echo '=== RUN   TestEnds' ;;
*TestLeaks*) echo '--- PASS: TestLeaks (0.00s)'; exit 1 ;;
*TestSlow*) sleep 0.2; echo '--- PASS: TestSlow (0.20s)' ;;
*TestSkips*) echo '--- SKIP: TestSkips (0.00s)' ;;
*) t=$(echo "$5" | tr -d '^()$') && printf -- 'text--- PASS: %s (0.00s)\n--- PASS: x\n' "$t" ;;
esac
`

// gpuRun runs scripts/gpu-run on a pack of packages with these tests, in so many processes at once. It returns the
// output, whether it succeeded, and what the processes of a package appended.
func gpuRun(t *testing.T, jobs string, packages map[string][]string) (
	out string, ok bool, order func(name string) []string) {
	t.Helper()
	dir := t.TempDir()
	stage, pack := filepath.Join(dir, "stage"), filepath.Join(dir, "pack")
	write := func(path, text string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	list := ""
	for name, tests := range packages {
		list += "./" + name + "\n"
		write(filepath.Join(stage, name, "gpu.test"), binary)
		write(filepath.Join(stage, name, "tests"), strings.Join(append(tests, "BenchmarkB", "ok"), "\n"))
	}
	write(filepath.Join(stage, "packages"), list)
	script, err := os.ReadFile("scripts/gpu-run")
	if err != nil {
		t.Fatal(err)
	}
	write(filepath.Join(dir, "run.sh"), string(script))
	if err := exec.Command("tar", "-C", stage, "-cf", filepath.Join(dir, "gpu.tar"), ".").Run(); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(filepath.Join(dir, "run.sh"))
	cmd.Env = append(os.Environ(), "OUT="+filepath.Join(dir, "out"), "PACK="+pack, "JOBS="+jobs)
	text, err := cmd.CombinedOutput()
	return string(text), err == nil, func(name string) []string {
		text, err := os.ReadFile(filepath.Join(pack, name, "order"))
		if err != nil {
			t.Fatal(err)
		}
		return strings.Fields(string(text))
	}
}

// TestGPURun checks the summary of packages that pass, the number of processes at once, and that a test that needs all
// memory runs after the others.
func TestGPURun(t *testing.T) {
	out, ok, order := gpuRun(t, "1", map[string][]string{
		"a/b": {"TestBeyondInt32", "TestX", "TestSkips", "ExampleZ", "TestSlow"},
	})
	if !ok || !strings.HasPrefix(out, "PASS  a/b ") || !strings.Contains(out, " 4 passed, 1 skipped") {
		t.Errorf("it succeeds: %t\n%s", ok, out)
	}
	want := []string{"^(TestX)$", "^(TestSkips)$", "^(ExampleZ)$", "^(TestSlow)$", "^(TestBeyondInt32)$"}
	if got := order("a/b"); !slices.Equal(got, want) {
		t.Errorf("it ran %q, want %q", got, want)
	}
}

// TestGPURunNamesFailures checks that each way to fail is named, and that other packages still run.
func TestGPURunNamesFailures(t *testing.T) {
	out, ok, _ := gpuRun(t, "3", map[string][]string{
		"good": {"TestX"}, "none": nil, "bad": {"TestX", "TestFails", "TestPanics", "TestEnds", "TestLeaks"},
	})
	for _, want := range []string{"PASS  good ", "FAIL  bad ", "gpu-run: status 1 of TestFails\n",
		"gpu-run: status 2 of TestPanics\n", "gpu-run: status 0 of TestEnds\n", "gpu-run: status 1 of TestLeaks\n",
		"FAIL  none ", "gpu-run: the package has no tests\n"} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is missing", want)
		}
	}
	if ok || strings.Contains(out, "of TestX") {
		t.Errorf("it succeeds: %t\n%s", ok, out)
	}
}

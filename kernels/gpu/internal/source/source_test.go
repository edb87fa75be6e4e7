package source

import (
	"io/fs"
	"slices"
	"strings"
	"testing"
)

func TestCatalogue(t *testing.T) {
	used := map[string]bool{}
	names := map[string]bool{}
	for _, p := range Programs() {
		if names[p.Name] {
			t.Errorf("there are two programs %s", p.Name)
		}
		names[p.Name] = true
		if q, err := Find(p.Name); err != nil || q.File != p.File {
			t.Errorf("Find(%s) = %v, %v", p.Name, q, err)
		}
		for _, a := range p.Archs {
			if !slices.Contains(Archs, a) {
				t.Errorf("%s is for %s, which CI does not compile for", p.Name, a)
			}
		}
		for _, e := range p.Entries {
			if (e.Local > 0) != (e.Why != "") {
				t.Errorf("%s: local memory of %s without a reason, or a reason without it", p.Name, e.Name)
			}
		}
		_, headers, err := p.Source()
		if err != nil {
			t.Error(err)
		}
		used[p.File] = true
		for h := range headers {
			used[h] = true
		}
	}
	all, err := fs.Glob(files, "*.cu*")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range all {
		if !used[f] {
			t.Errorf("%s is in no program", f)
		}
		text, _ := files.ReadFile(f)
		if n := strings.Count(string(text), "\n"); n > 600 {
			t.Errorf("%s has %d lines; split it", f, n)
		}
	}
}

func TestFindNamesWhatIsMissing(t *testing.T) {
	if _, err := Find("nothing"); err == nil || !strings.Contains(err.Error(), `"nothing"`) {
		t.Errorf("error %v", err)
	}
}

func TestSourceTakesOnlyWhatIsIncluded(t *testing.T) {
	p, err := Find("gemm_simple")
	if err != nil {
		t.Fatal(err)
	}
	code, headers, err := p.Source()
	if err != nil || len(code) == 0 || len(headers) != 1 || headers["element.cuh"] == nil {
		t.Errorf("%d bytes of code, %d headers, %v", len(code), len(headers), err)
	}
}

func TestArch(t *testing.T) {
	for capability, want := range map[int]string{80: "sm_80", 89: "sm_89", 90: "sm_90a", 100: "sm_100a", 120: "sm_120a"} {
		if got := Arch(capability); got != want {
			t.Errorf("Arch(%d) = %s, want %s", capability, got, want)
		}
	}
}

package config

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/model/hf"
)

var update = flag.Bool("update", false, "rewrite testdata and docs/config.md from what the code does")

// A testCase is a file of testdata. Its lines "# set:", "# ranks:" and "# device:" are the command line. Its lines "#
// want:" are the expected faults or warnings: line or flag, key, message.
type testCase struct {
	file string
	opts Options
	want []string
}

func readCase(t *testing.T, file string) testCase {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	c := testCase{file: file}
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		name, value, _ := strings.Cut(strings.TrimPrefix(lines.Text(), "# "), ": ")
		switch {
		case !strings.HasPrefix(lines.Text(), "# "):
		case name == "set":
			c.opts.Set = append(c.opts.Set, value)
		case name == "ranks":
			if c.opts.Ranks, err = strconv.Atoi(value); err != nil {
				t.Fatal(err)
			}
		case name == "device":
			c.opts.Device = value
		case name == "want":
			c.want = append(c.want, value)
		}
	}
	return c
}

// plain removes machine-dependent parts of faults.
func plain(t *testing.T, file string, list Errors) []string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, f := range list {
		s := strings.TrimPrefix(f.String(), file+":")
		out = append(out, strings.ReplaceAll(s, dir, "DIR"))
	}
	return out
}

// rewrite replaces the "# want:" lines at the end of a file.
func rewrite(t *testing.T, file string, want []string) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	for line := range strings.Lines(string(text)) {
		if !strings.HasPrefix(line, "# want:") {
			b.WriteString(line)
		}
	}
	for _, w := range want {
		fmt.Fprintf(&b, "# want: %s\n", w)
	}
	write(t, file, b.String())
}

func compare(t *testing.T, c testCase, got []string) {
	t.Helper()
	if *update {
		rewrite(t, c.file, got)
		return
	}
	if a, b := strings.Join(got, "\n"), strings.Join(c.want, "\n"); a != b {
		t.Errorf("got\n%s\nwant\n%s", a, b)
	}
}

func testFiles(t *testing.T, pattern string, least int) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("testdata", pattern))
	if err != nil || len(files) < least {
		t.Fatalf("%d files %s, want at least %d (%v)", len(files), pattern, least, err)
	}
	return files
}

func TestBad(t *testing.T) {
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	hf.Hub = filepath.Join(dir, "hub")
	defer func() { hf.Hub = "" }()
	for _, file := range testFiles(t, "*.bad.yaml", 60) {
		t.Run(filepath.Base(file), func(t *testing.T) {
			c := readCase(t, file)
			cfg, err := Load(file, c.opts)
			var list Errors
			if !errors.As(err, &list) || cfg != nil {
				t.Fatalf("Load = %v, %v, want no config and faults", cfg, err)
			}
			if len(c.want) == 0 && !*update {
				t.Fatal("the file has no want line")
			}
			compare(t, c, plain(t, file, list))
		})
	}
}

func TestGood(t *testing.T) {
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range testFiles(t, "*.good.yaml", 10) {
		t.Run(filepath.Base(file), func(t *testing.T) {
			c := readCase(t, file)
			cfg, err := Load(file, c.opts)
			if err != nil {
				t.Fatalf("Load: %v", err)
			}
			compare(t, c, plain(t, file, cfg.Warnings))
			checkRoundTrip(t, cfg)
			golden := strings.TrimSuffix(file, ".good.yaml") + ".resolved.yaml"
			got := strings.ReplaceAll(string(cfg.YAML()), dir, "DIR")
			if *update {
				write(t, golden, got)
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if got != string(want) {
				t.Errorf("resolved config is\n%s\nwant\n%s", got, want)
			}
		})
	}
}

// checkRoundTrip loads the config that cfg writes, from another directory.
func checkRoundTrip(t *testing.T, cfg *Config) {
	t.Helper()
	again, err := Load(write(t, filepath.Join(t.TempDir(), "config.yaml"), string(cfg.YAML())), Options{})
	if err != nil {
		t.Fatalf("the resolved config does not load: %v\n%s", err, cfg.YAML())
	}
	if !again.Equal(cfg) {
		t.Errorf("the resolved config loads as another:\n%s\nwant\n%s", again.YAML(), cfg.YAML())
	}
	if cfg.Parallel.Context > 0 { // a second Resolve changes nothing
		if err := again.Resolve(cfg.Parallel.Context*cfg.Parallel.Data, "cuda"); err != nil || !again.Equal(cfg) {
			t.Errorf("resolving twice: %v\n%s\nwant\n%s", err, again.YAML(), cfg.YAML())
		}
	}
}

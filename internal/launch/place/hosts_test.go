package place

import (
	"errors"
	"slices"
	"strings"
	"testing"
)

// Output of `scontrol show hostnames` of Slurm 22.05; for text after brackets, of later versions. scripts/test-slurm
// compares more lists with the program.
func TestHosts(t *testing.T) {
	for list, want := range map[string]string{
		"":                         "",
		",":                        "",
		"node[01-03,07]":           "node01 node02 node03 node07",
		"a[1-2]b[3-4]":             "a1b3 a1b4 a2b3 a2b4",
		"a[1-2]b[3-4]c[5-6]":       "a1b3c5 a1b3c6 a2b3c5 a2b3c6 a1b4c5 a1b4c6 a2b4c5 a2b4c6",
		"n[8-11]":                  "n8 n9 n10 n11",
		"n[08-11]":                 "n08 n09 n10 n11",
		"n[098-101]":               "n098 n099 n100 n101",
		"n[001,01,1]":              "n001 n01 n1",
		"n[01-1]":                  "n01",
		"gpu-a[001-002],login1":    "gpu-a001 gpu-a002 login1",
		"n[1-2] m[3-4]":            "n1 n2 m3 m4",
		"n[1-2]\tm1\nk2":           "n1 n2 m1 k2",
		"n[2,1]":                   "n2 n1",
		"n[1-2],n[1-2]":            "n1 n2 n1 n2",
		"a,b,,c":                   "a b c",
		"[1-3]":                    "1 2 3",
		"n[1][2]":                  "n12",
		"rack[1-2]-node[01-02]-ib": "rack1-node01-ib rack1-node02-ib rack2-node01-ib rack2-node02-ib",
		"x[1,3-4]y":                "x1y x3y x4y",
		"n[0-2]-ib0":               "n0-ib0 n1-ib0 n2-ib0",
	} {
		if got, err := Hosts(list); err != nil || strings.Join(got, " ") != want {
			t.Errorf("Hosts(%q) = %q, %v; want %q", list, got, err, want)
		}
	}
	for _, list := range []string{
		"n[1-70000]", "n[3-1]", "n[]", "n[a-c]", "n[1-3", "n[1,]", "n[,1]", "n[ 1-2 " +
			"]", "n[-2]", "n[1--2]", "n[1-2-3]", "n]1", "n[1]]", "n[[1]]",
		"n[+1-2]", "n[1-65535],m[1-2]", "a[1-300]b[1-300]", "a[1-2]b[1-65536]", "n\x1b[1]", "n\x00", "nö",
		"n[0-x]", "n[0-]", "n[0-99999999999]", strings.Repeat("[1-65536]", 4), "n[1234567890123456789]", strings.Repeat("[1]", 256), strings.Repeat("n", 256), strings.Repeat("n,", 1<<20), strings.Repeat(",", 1<<21),
	} {
		if got, err := Hosts(list); err == nil {
			t.Errorf("Hosts(%.40q) = %d hosts, want an error", list, len(got))
		} else if strings.ContainsAny(err.Error(), "\x1b\x00") || len(err.Error()) > 1000 {
			t.Errorf("Hosts(%.40q): error %.100q", list, err)
		}
	}
	if _, err := Hosts("n[3-1]"); !errors.Is(err, errHostList) {
		t.Errorf("a falling range: %v", err)
	}
	if got, err := Hosts("n[1-65536]"); err != nil || len(got) != 65536 {
		t.Errorf("64K hosts: %d, %v", len(got), err)
	}
}

func TestCounts(t *testing.T) {
	for text, want := range map[string][]int{"2(x3),1": {2, 2, 2, 1}, "4": {4}, "1(x2)": {1, 1},
		"1,2(x2),3": {1, 2, 2, 3}, "0,2": {0, 2}} {
		if got, err := Counts(text); err != nil || !slices.Equal(got, want) {
			t.Errorf("Counts(%q) = %v, %v; want %v", text, got, err, want)
		}
	}
	for _, text := range []string{"", "a", "2(x3", "2(x0)", "2(x)", "(x2)", "2x3", "-1", "2,", "1(x70000)",
		"1048576(x2)", "1048576,1", "2(x3))", "1(x1234567890123456789)", strings.Repeat("1,", 1<<20)} {
		if got, err := Counts(text); err == nil {
			t.Errorf("Counts(%.40q) = %d counts, want an error", text, len(got))
		}
	}
}

func FuzzHosts(f *testing.F) {
	for _, list := range []string{"node[01-03,07],login1", "a[1-2]b[3-4]c[5-6]-ib", "n[1-3", "n[0-65536]",
		"a[1-9][1-9][1-9][1-9][1-9]"} {
		f.Add(list)
	}
	f.Fuzz(func(t *testing.T, list string) {
		hosts, err := Hosts(list)
		if err != nil {
			return
		}
		if len(hosts) > maxHosts {
			t.Fatalf("%d hosts", len(hosts))
		}
		for _, h := range hosts {
			if h == "" || len(h) > maxHostName || strings.ContainsAny(h, ", \t\n[]") {
				t.Fatalf("host %q", h)
			}
		}
		// An expanded list expands to itself.
		if again, err := Hosts(strings.Join(hosts, ",")); err != nil || !slices.Equal(again, hosts) {
			if len(strings.Join(hosts, ",")) <= maxHostList {
				t.Fatalf("%d hosts become %d, %v", len(hosts), len(again), err)
			}
		}
	})
}

func FuzzCounts(f *testing.F) {
	for _, text := range []string{"2(x3),1", "1", "4(x65536)", "1(x"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		counts, err := Counts(text)
		sum := 0
		for _, n := range counts {
			sum += n
		}
		if err == nil && (len(counts) == 0 || len(counts) > maxHosts || sum > maxTasks) {
			t.Fatalf("%d counts of %d tasks", len(counts), sum)
		}
	})
}

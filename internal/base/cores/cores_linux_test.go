package cores

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cprun/cprun/internal/base/must"
)

var as = flag.String("as", "", "keep: bind this process next to device 0 in the directory of the argument; "+
	"pin: bind it to the core of the argument")

func TestMain(m *testing.M) {
	flag.Parse()
	if *as == "" {
		os.Exit(m.Run())
	}
	addThreads()
	switch *as {
	case "keep":
		bound, err := keepNear(flag.Arg(0), "0")
		fmt.Print(bound, " ", err, " ")
	case "pin":
		core, _ := strconv.Atoi(flag.Arg(0))
		fmt.Print(Pin(core), " ")
	}
	addThreads()
	fmt.Println(masks())
}

// addThreads starts threads, which end with the process.
func addThreads() {
	var started sync.WaitGroup
	for range 4 {
		started.Add(1)
		go func() {
			runtime.LockOSThread()
			started.Done()
			select {}
		}()
	}
	started.Wait()
}

// masks returns the distinct masks of this process's threads.
func masks() string {
	masks := map[string]bool{}
	entries, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return err.Error()
	}
	for _, e := range entries {
		id, _ := strconv.Atoi(e.Name())
		var set unix.CPUSet
		if unix.SchedGetaffinity(id, &set) == nil {
			masks[coresOf(&set)] = true
		}
	}
	list := ""
	for m := range masks {
		list += m
	}
	return list
}

func coresOf(set *unix.CPUSet) string {
	var list []int
	for i := range maxCores {
		if set.IsSet(i) {
			list = append(list, i)
		}
	}
	return fmt.Sprint(list)
}

// TestKeepNear checks a process for each list of cores that a kernel may report as next to the device. GOMAXPROCS limits
// the goroutines that run at once.
func TestKeepNear(t *testing.T) {
	var own unix.CPUSet
	must.Do(t, unix.SchedGetaffinity(0, &own))
	all, first := coresOf(&own), 0
	for !own.IsSet(first) {
		first++
	}
	one, absent := strconv.Itoa(first), ""
	for i := range maxCores {
		if !own.IsSet(i) {
			absent = strconv.Itoa(i)
			break
		}
	}
	nothing := "[] <nil> " + all
	bound := fmt.Sprintf("[%s] <nil> [%[1]s]", one)
	if own.Count() == 1 {
		bound = nothing
	}
	for name, c := range map[string]struct{ list, procs, want string }{
		"one core":              {one, "1", bound},
		"too few cores":         {one, "2", nothing},
		"cores of the host":     {"0-1023", "1", nothing},
		"cores not in the mask": {absent, "1", nothing},
		"a mask cuts the node":  {one + "," + absent, "1", bound},
		"no list":               {"", "1", `cores is ""`},
		"no such list":          {"0-1024", "1", `cores is "0-1024"`},
	} {
		dir := t.TempDir()
		must.Do(t, os.Mkdir(filepath.Join(dir, "0"), 0o755))
		must.Do(t, os.WriteFile(filepath.Join(dir, "0", "local_cpulist"), []byte(c.list+"\n"), 0o600))
		if got := run(t, c.procs, "keep", dir); !strings.Contains(got, c.want) || strings.HasPrefix(c.want, "[") && got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
	dir := t.TempDir()
	must.Do(t, os.MkdirAll(filepath.Join(dir, "0", "local_cpulist"), 0o755))
	if got := run(t, "1", "keep", dir); !strings.Contains(got, "not a regular file") {
		t.Errorf("a directory in place of the list: %s", got)
	}
	if got := run(t, "1", "keep", t.TempDir()); got != nothing {
		t.Errorf("without the device in /sys: %s, want %s", got, nothing)
	}
}

func TestParse(t *testing.T) {
	if got, err := parse("0-1,4\n"); fmt.Sprint(got) != "[0 1 4]" || err != nil {
		t.Errorf("%v, %v", got, err)
	}
	for _, list := range []string{"", "x", "0-x", "x-1", "-1", "0,", "0-1024"} {
		if got, err := parse(list); err == nil {
			t.Errorf("%q: %v", list, got)
		}
	}
	if n := Online(); n < len(Own()) {
		t.Errorf("%d cores are online, and this process has %d", n, len(Own()))
	}
}

func TestPin(t *testing.T) {
	core := fmt.Sprint(Own()[0])
	if got, want := run(t, "1", "pin", core), "<nil> ["+core+"]"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if got := run(t, "1", "pin", strconv.Itoa(maxCores-1)); !strings.HasPrefix(got, "thread ") {
		t.Errorf("an absent core: %s", got)
	}
}

// run binds a process and returns its result and the masks of its threads.
func run(t *testing.T, procs, as, arg string) string {
	c := exec.Command("/proc/self/exe", "-as", as, arg)
	c.Env = append(os.Environ(), "GOMAXPROCS="+procs)
	out, err := c.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return strings.TrimSpace(string(out))
}

package place

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "TestFind writes the placements into testdata: read the difference")

// The file cases has the environments and flags of TestFind. In it, "let NAME VAR=1 …" names variables; a line such as
// "$NAME VAR=2 -OTHER --nnodes=4" sets and unsets variables and passes flags; the indented lines below it are the
// placement, with its notes, or the error.
const cases = "testdata/places.txt"

// A findCase is one line of cases.
type findCase struct {
	env   map[string]string
	flags Flags
}

func (c *findCase) find() (Placement, error) {
	return Find(func(name string) string { return c.env[name] }, c.flags)
}

// parseCase parses a line, with the named variables.
func parseCase(t testing.TB, line string, let map[string]string) findCase {
	t.Helper()
	c := findCase{env: map[string]string{}, flags: Flags{NodeRank: -1, Hostname: "here"}}
	for i, word := 0, strings.Fields(line); i < len(word); i++ {
		if named, ok := strings.CutPrefix(word[i], "$"); ok {
			word = slices.Insert(word, i+1, strings.Fields(let[named])...)
			continue
		}
		name, value, set := strings.Cut(word[i], "=")
		if text, err := strconv.Unquote(value); err == nil {
			value = text
		}
		n, _ := strconv.Atoi(value)
		switch {
		case name == "--nnodes":
			c.flags.Nodes = value
		case name == "--rendezvous":
			c.flags.Rendezvous = value
		case name == "--node-rank":
			c.flags.NodeRank = n
		case name == "--nproc":
			c.flags.NProc = n
		case set:
			c.env[name] = value
		case name[0] == '-':
			delete(c.env, name[1:])
		case word[i] != "nothing":
			t.Fatalf("%s: %q", line, word[i])
		}
	}
	return c
}

// replay calls f with each case of the file's text, and returns the text with the results of f.
func replay(t testing.TB, text string, f func(c findCase) []string) string {
	let := map[string]string{"long": "PMIX_NAMESPACE=" + strings.Repeat("j", maxText)}
	var out strings.Builder
	for line := range strings.Lines(text) {
		if line[0] == ' ' {
			continue
		}
		out.WriteString(line)
		if named, ok := strings.CutPrefix(line, "let "); ok {
			name, variables, _ := strings.Cut(named, " ")
			let[name] = variables
		} else if line[0] != '#' && line[0] != '\n' {
			for _, result := range f(parseCase(t, line, let)) {
				fmt.Fprintln(&out, " ", result)
			}
		}
	}
	return out.String()
}

// readCases returns the text of the cases, and each of them.
func readCases(t testing.TB) (text string, all []findCase) {
	b, err := os.ReadFile(cases)
	if err != nil {
		t.Fatal(err)
	}
	replay(t, string(b), func(c findCase) []string { all = append(all, c); return nil })
	return string(b), all
}

// summary formats a placement in one line.
func summary(p Placement) string {
	s := fmt.Sprintf("%s %s rank %d of %d:%d", p.Source, p.Job, p.Rank, p.MinAgents, p.MaxAgents)
	s += fmt.Sprintf(" workers %d local %d of %d %s", p.Workers, p.LocalRank, p.LocalAgents, p.Node)
	if p.SlurmJob != "" {
		s += " requeue " + p.SlurmJob
	}
	if p.Hosts != nil {
		s += fmt.Sprint(" ", p.Hosts)
	}
	if p.Rendezvous != "" {
		s += " at " + p.Rendezvous
	}
	return s
}

func TestFind(t *testing.T) {
	want, _ := readCases(t)
	got := replay(t, want, func(c findCase) (lines []string) {
		p, err := c.find()
		if err != nil {
			return []string{"error: " + err.Error()}
		}
		lines = append(lines, summary(p))
		for _, note := range p.Notes {
			lines = append(lines, "note: "+note)
		}
		return lines
	})
	if *update {
		if err := os.WriteFile(cases, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	wanted := strings.Split(want, "\n")
	for i, line := range strings.Split(got, "\n") {
		if i == len(wanted) || line != wanted[i] {
			t.Fatalf("%s:%d: the result is\n%s", cases, i+1, line)
		}
	}
}

func TestAddress(t *testing.T) {
	for text, want := range map[string]string{
		"head:1": "head:1", "head:65535": "head:65535", "head": "head:7", "[fe80::1]:2": "[fe80::1]:2",
		"fe80::1": "[fe80::1]:7", "[fe80::]": "[fe80::]:7", "fe80::": "[fe80::]:7",
		"": "", "head:": "", ":1": "", "a:b:": "", "head:0": "", "head:-1": "", "head:65536": "", "head:x": "",
		"a b:1": "", "a\x7f:1": "", "a/b:1": "", "a'b:1": "", strings.Repeat("h", maxHostName+1) + ":1": "",
	} {
		if got, err := address(text, 7); got != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v; want %q", text, got, err, want)
		}
	}
	if got, err := address("head", 0); err == nil {
		t.Errorf("without a port: %q", got)
	}
	for addr, want := range map[string]bool{"localhost:1": true, "LocalHost:1": true, "127.0.0.2:1": true, "[::1]:1": true,
		"0.0.0.0:1": true, "[::]:1": true, "node01:1": false, "10.0.0.1:1": false} {
		if loopback(addr) != want {
			t.Errorf("%s is local: %t", addr, !want)
		}
	}
}

func TestNodeRange(t *testing.T) {
	for text, want := range map[string][2]int{"1": {1, 1}, "2:4": {2, 4}, "1:65536": {1, 65536},
		"": {}, "0": {}, "0:2": {}, "x:2": {}, "2:x": {}, "-1:2": {}, "4:2": {}, "65537": {}, "1:2:3": {}} {
		least, most, err := nodeRange(text)
		if got := [2]int{least, most}; got != want || (err == nil) != (want != [2]int{}) {
			t.Errorf("%q: %v, %v; want %v", text, got, err, want)
		}
	}
}

// TestPortsOfNeighboursDiffer checks that jobs of an array, and concurrent steps of one job, have different ports on
// shared nodes.
func TestPortsOfNeighboursDiffer(t *testing.T) {
	seen := map[int]string{}
	for job := uint64(4_000_000); job < 4_000_900; job++ {
		for step := uint64(0); step < 4; step++ {
			port, who := stepPort(job, step), fmt.Sprintf("%d.%d", job, step)
			if port < firstPort || port >= firstPort+ports {
				t.Fatalf("%s: port %d", who, port)
			}
			if other, taken := seen[port]; taken {
				t.Fatalf("%s and %s both have port %d", who, other, port)
			}
			seen[port] = who
		}
	}
}

// TestVariablesAreListed checks that cprun doctor lists exactly the variables that Find reads.
func TestVariablesAreListed(t *testing.T) {
	listed, read := map[string]bool{}, map[string]bool{}
	for _, v := range VariableList() {
		if listed[v.Name] || v.Meaning == "" {
			t.Errorf("%s is there twice, or has no meaning", v.Name)
		}
		listed[v.Name] = true
	}
	_, all := readCases(t)
	for _, c := range all {
		Find(func(name string) string {
			read[name] = true
			return c.env[name]
		}, c.flags)
	}
	for name := range read {
		if !listed[name] {
			t.Errorf("%s is read and not listed", name)
		}
	}
	for name := range listed {
		if !read[name] {
			t.Errorf("%s is listed, and no case reads it", name)
		}
	}
}

// TestVariablesAreDocumented checks that the table in docs/cluster.md has them as well.
func TestVariablesAreDocumented(t *testing.T) {
	page, err := os.ReadFile("../../../docs/cluster.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range VariableList() {
		if !strings.Contains(string(page), "`"+v.Name+"`") {
			t.Errorf("docs/cluster.md does not name %s", v.Name)
		}
	}
}

// environment parses "A=1 B=2".
func environment(text string) map[string]string {
	env := map[string]string{}
	for v := range strings.FieldsSeq(text) {
		name, value, _ := strings.Cut(v, "=")
		env[name] = value
	}
	return env
}

// FuzzFind checks that any environment gives a valid placement, or a short message without control characters.
func FuzzFind(f *testing.F) {
	_, all := readCases(f)
	for _, c := range all {
		var text []string
		for name, value := range c.env {
			text = append(text, name+"="+value)
		}
		slices.Sort(text)
		f.Add(strings.Join(text, " "), c.flags.Nodes, c.flags.Rendezvous, c.flags.NodeRank, c.flags.NProc)
		f.Add(strings.Join(text, " "), "1:2", "head:1", 0, 2)
	}
	f.Fuzz(func(t *testing.T, text, nodes, meet string, rank, nproc int) {
		c := findCase{environment(text), Flags{NProc: nproc, Nodes: nodes, NodeRank: rank, Rendezvous: meet}}
		p, err := c.find()
		if err != nil {
			if len(err.Error()) > 8000 || strings.ContainsAny(err.Error(), "\x00\x1b\n") {
				t.Fatalf("%.200q", err)
			}
			return
		}
		checkPlace(t, p)
	})
}

func checkPlace(t *testing.T, p Placement) {
	t.Helper()
	switch {
	case p.MinAgents < 1 || p.MaxAgents < p.MinAgents || p.Rank < -1 || p.Rank >= p.MaxAgents:
		t.Fatalf("rank %d of %d:%d", p.Rank, p.MinAgents, p.MaxAgents)
	case p.LocalRank < 0 || p.LocalRank >= p.LocalAgents || p.Workers < 0:
		t.Fatalf("local %d of %d, %d workers", p.LocalRank, p.LocalAgents, p.Workers)
	case p.Several() != (p.Rendezvous != ""), p.Several() && p.Job == "", p.Hosts != nil && p.Source != Slurm:
		t.Fatalf("%s", summary(p))
	}
	if p.Several() {
		if got, err := address(p.Rendezvous, 0); err != nil || got != p.Rendezvous {
			t.Fatalf("%s: %v", got, err)
		}
	}
	if slices.ContainsFunc(
		append(p.Notes, p.Job, p.Node, p.Rendezvous),
		func(s string) bool { return strings.ContainsAny(s, "\x00\x1b\n") },
	) {
		t.Fatalf("%q", p.Notes)
	}
}

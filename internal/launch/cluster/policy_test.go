package cluster

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/launch"
)

// members parses agents in the form name@host:node rank; without a rank it is -1.
func members(text string) (all []Member) {
	for _, f := range strings.Fields(text) {
		m := Member{NodeRank: -1, NProc: 2}
		f, rank, _ := strings.Cut(f, ":")
		fmt.Sscan(rank, &m.NodeRank)
		m.Name, m.HostID, _ = strings.Cut(f, "@")
		if m.HostID == "" {
			m.HostID = m.Name
		}
		m.Host = m.HostID
		all = append(all, m)
	}
	return all
}

// shown formats agents for comparison, optionally with first ranks.
func shown(all []Member, first bool) string {
	var out []string
	for _, m := range all {
		s := fmt.Sprintf("%s:%d", m.Name, m.NodeRank)
		if first {
			s += fmt.Sprintf("/%d", m.FirstRank)
		}
		out = append(out, s)
	}
	return strings.Join(out, " ")
}

func TestPlace(t *testing.T) {
	for _, c := range []struct{ agents, want string }{
		{"a:0 b:1 c:2", "a:0/0 b:1/2 c:2/4"},
		{"c:2 a:0 b:1", "a:0/0 b:1/2 c:2/4"},
		{"a@x:0 b@y:1 c@x:2 d@y:3", "a:0/0 c:2/2 b:1/4 d:3/6"}, // agents of a host are adjacent
		{"a@y:0 b@x:1 c@y:5", "a:0/0 c:5/2 b:1/4"},
		{"b:4", "b:4/0"},
	} {
		placed, size := assignRanks(members(c.agents))
		if got := shown(placed, true); got != c.want || size != 2*len(placed) {
			t.Errorf("%s: %s, %d ranks; want %s", c.agents, got, size, c.want)
		}
	}
	uneven := members("a:0 b:1")
	uneven[0].NProc = 5
	if placed, size := assignRanks(uneven); placed[1].FirstRank != 5 || size != 7 {
		t.Errorf("uneven: %+v, %d", placed, size)
	}
}

func TestChoose(t *testing.T) {
	for _, c := range []struct {
		name, there, last string
		tally             tally
		least, most       int
		want, left        string
	}{
		{"as they came", "b a c", "", tally{}, 3, 3, "b:0 a:1 c:2", ""},
		{"ranks that are wanted", "b:1 a:0 c:2", "", tally{}, 3, 3, "b:1 a:0 c:2", ""},
		{"the others get what is free", "b a:0 c:2", "", tally{}, 3, 3, "a:0 c:2 b:1", ""},
		{"too many", "a b c d", "", tally{}, 2, 3, "a:0 b:1 c:2", ""},
		{"who was there before comes first", "s a b c", "a:0 b:1 c:2", tally{}, 3, 3, "a:0 b:1 c:2", ""},
		{"and keeps its rank", "s c b", "a:0 b:1 c:2", tally{}, 3, 3, "c:2 b:1 s:0", ""},
		{"unless another asks for it", "s:1 b", "a:0 b:1 c:2", tally{}, 2, 3, "b:0 s:1", ""},
		{"fewer than needed", "a", "a:0 b:1", tally{}, 2, 2, "a:0", ""},
		{"one gone, nobody new", "b c", "a:0 b:1 c:2", tally{}, 2, 3, "b:1 c:2", ""},
		{"left out", "a b c", "a:0 b:1 c:2", tally{Cause: "b#1", InRow: 3}, 2, 3, "a:0 c:2",
			"node b (node rank 1) is left out: its ranks were the first to fail 3 times in a row"},
		{"not yet", "a b c", "a:0 b:1 c:2", tally{Cause: "b#1", InRow: 2}, 2, 3, "a:0 b:1 c:2", ""},
		{"needed all the same", "a b", "a:0 b:1", tally{Cause: "b#1", InRow: 3}, 2, 2, "a:0 b:1", ""},
		{"lost too often", "a b:1 c", "a:0 c:2", tally{Lost: map[string]int{"b#1": 2}}, 2, 3, "a:0 c:2",
			"node b (node rank 1) is left out: it was lost 2 times"},
		{"a spare in its place", "a b c s", "a:0 b:1 c:2", tally{Cause: "b#1", InRow: 3}, 3, 3, "a:0 c:2 s:3",
			"node b (node rank 1) is left out: its ranks were the first to fail 3 times in a row"},
	} {
		var there []candidate
		for i, m := range members(c.there) {
			there = append(there, candidate{m, i})
		}
		got, left := chooseMembers(there, &Assignment{Members: members(c.last)}, &c.tally, c.least, c.most)
		if shown(got, false) != c.want || strings.Join(left, "; ") != c.left {
			t.Errorf("%s: %s (%q), want %s (%q)", c.name, shown(got, false), left, c.want, c.left)
		}
	}
}

func TestTally(t *testing.T) {
	var tl tally
	for i, c := range []struct {
		cause string
		lost  []string
		inRow int
	}{{"a#0", nil, 1}, {"a#0", nil, 2}, {"b#1", nil, 1}, {"b#1", nil, 2}, {"", nil, 0},
		{"b#1", []string{"b#1"}, 1}, {"b#1", []string{"b#1", "a#0"}, 2}} {
		before := tl.Lost
		n := before["b#1"]
		tl.record(c.cause, c.lost)
		if tl.InRow != c.inRow {
			t.Errorf("%d: %d in a row, want %d", i, tl.InRow, c.inRow)
		}
		if before["b#1"] != n {
			t.Error("an older tally has changed")
		}
	}
	if tl.excludedFor("b#1") == "" || tl.excludedFor("a#0") != "" {
		t.Errorf("tally %+v", tl)
	}
}

func TestQuorum(t *testing.T) {
	for _, c := range []struct {
		voters, yes string
		want        bool
	}{
		{"a", "a", true},
		{"a b", "a", true}, {"a b", "b", false}, {"a b", "a b", true},
		{"a b c", "a", false}, {"a b c", "b c", true},
		{"a b c d", "a b", true}, {"a b c d", "c d", false}, {"a b c d", "b c d", true}, {"a b c d", "a", false},
		{"a b c", "x y z", false}, {"", "a", false},
	} {
		yes := map[string]bool{}
		for _, f := range strings.Fields(c.yes) {
			yes[f] = true
		}
		if got := quorum(members(c.voters), func(n string) bool { return yes[n] }); got != c.want {
			t.Errorf("%s of %s: %v", c.yes, c.voters, got)
		}
	}
}

// TestQuorumsShareAnAgent checks that any two quorums share an agent, so that at most one side of a split network goes
// on.
func TestQuorumsShareAnAgent(t *testing.T) {
	for n := 1; n <= 7; n++ {
		var voters []Member
		for i := range n {
			voters = append(voters, Member{Name: fmt.Sprint(i)})
		}
		in := func(set int) func(string) bool {
			return func(name string) bool {
				var i int
				fmt.Sscan(name, &i)
				return set>>i&1 == 1
			}
		}
		for x := range 1 << n {
			for y := range 1 << n {
				if x&y == 0 && quorum(voters, in(x)) && quorum(voters, in(y)) {
					t.Fatalf("%d voters: %b and %b decide alone", n, x, y)
				}
			}
		}
	}
}

// TestMergeBlames checks that the job's report names the first failure of all nodes.
func TestMergeBlames(t *testing.T) {
	w := Assignment{Generation: 1}
	w.Members, w.Size = assignRanks(members("a:0 b:1 c:2"))
	for i := range w.Members {
		w.Members[i].Addr = fmt.Sprintf("10.0.0.%d:1", i+1)
	}
	fail := func(rank int, class launch.Class, cause string) []launch.Failure {
		return []launch.Failure{{Rank: rank, Class: class, Cause: cause, Order: 1}}
	}
	for _, c := range []struct {
		name  string
		parts map[string]*part
		want  int
	}{
		{"the one that was lost", map[string]*part{
			"a": {failed: 2, ended: &ended{Ending: launch.Ending{Failures: fail(1, 2, "lost rank 4")}}},
			"b": {failed: 3, ended: &ended{Ending: launch.Ending{Failures: fail(2, 2, "lost rank 4")}}},
			"c": {failed: 1, lost: "no word for 5s"},
		}, 4},
		{"its own error before those of others", map[string]*part{
			"a": {failed: 1, ended: &ended{Ending: launch.Ending{Failures: fail(0, 2, "lost rank 3")}}},
			"b": {failed: 2, ended: &ended{Ending: launch.Ending{Failures: fail(3, 1, "loss is not finite")}}},
			"c": {failed: 3, ended: &ended{Ending: launch.Ending{Failures: fail(4, 3, "ended")}}},
		}, 3},
		{"of two equals the one heard of first", map[string]*part{
			"a": {failed: 2, ended: &ended{Ending: launch.Ending{Failures: fail(0, 1, "x")}}},
			"b": {ended: &ended{}},
			"c": {failed: 1, ended: &ended{Ending: launch.Ending{Failures: fail(5, 1, "y")}}},
		}, 5},
	} {
		r := &record{world: &w, members: c.parts}
		for i := range w.Members {
			c.parts[w.Members[i].Name].Member = w.Members[i]
		}
		e := r.merge("a", false)
		if len(e.Failures) == 0 || e.Failures[0].Rank != c.want {
			t.Errorf("%s: %+v", c.name, e.Failures)
		}
	}
}

// TestMergeKeepsTheEndings checks that merging leaves the agents' endings as they are, and which error counts.
func TestMergeKeepsTheEndings(t *testing.T) {
	own := errors.New("its own")
	w := assignmentOf(1, "a:0 b:1")
	r := newRecord(&w, time.Unix(0, 0))
	a := launch.Ending{Err: own, Failures: []launch.Failure{{Rank: 0, Order: 1}}}
	r.end("a", &ended{Ending: a, Fault: "node a"}, time.Unix(1, 0))
	r.end("b", &ended{Ending: launch.Ending{Failures: []launch.Failure{{Rank: 2, Order: 1}}}}, time.Unix(2, 0))
	for range 2 {
		if e := r.merge("a", true); e.Err != own || !e.Quiet || len(e.Failures) != 2 || e.Failures[0].Order != 1<<32+1 {
			t.Errorf("%+v", e)
		}
	}
	if r.merge("b", true).Quiet || r.merge("a", false).Quiet {
		t.Error("an error is quiet that its launcher does not know")
	}
}

// TestTooFew checks which nodes the reason names if too few have joined.
func TestTooFew(t *testing.T) {
	for _, c := range []struct {
		joined string
		least  int
		want   string
	}{
		{"b@y:2 a@x:0", 4, "only 2 of at least 4 nodes joined in 1m0s: x, y; missing node ranks: 1, 3"},
		{"b@y:2 a@x:0 c", 4, "only 3 of at least 4 nodes joined in 1m0s: c, x, y"}, // c has no rank yet
		{"", 100, "only 0 of at least 100 nodes joined in 1m0s: ; missing node ranks: " +
			"0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15"},
	} {
		var joined []candidate
		for _, m := range members(c.joined) {
			joined = append(joined, candidate{Member: m})
		}
		if got := tooFew(joined, c.least, time.Minute); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
}

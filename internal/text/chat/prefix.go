package chat

import "maps"

// These variables differ between the prefixes of a conversation.
const (
	messagesVar = "messages"
	promptVar   = "add_generation_prompt"
)

// A Trace renders messages, and then prefixes of them without starting again. It records the state before each
// iteration of a loop over the messages, and the messages that decided this state. Only one goroutine may use it.
type Trace struct {
	// Text is the rendering of all messages. Spans lists its generation blocks, Owners the message of each; -1: unknown.
	Text   string
	Spans  []Span
	Owners []int

	t        *Template
	vars     Vars
	size     int
	messages []Value
	places   map[*Dict]int // of messages, by address
	root     *scope
	node     int // the loop, in the template
	skipped  int // messages that the loop leaves out
	before   map[string]Value
	points   []point
}

// A point describes the rendering before an iteration of the loop.
type point struct{ out, seen int }

// everything marks a rendering that depends on the number of messages.
const everything = 1 << 40

// Prefix renders the first n messages, with or without a prompt. The result is Text up to byte same, and rest.
func (c *Trace) Prefix(n int, prompt bool) (same int, rest string, err error) {
	vars := maps.Clone(c.vars)
	vars[messagesVar], vars[promptVar] = c.messages[:n], prompt
	at := min(n-c.skipped, len(c.points)-1)
	for at > 0 && c.points[at].seen > n {
		at--
	}
	if at <= 0 {
		rest, _, err = c.t.Render(vars)
		return 0, rest, err
	}
	r := c.t.newRun(c.size, &Trace{})
	defer caught(&err, &r.line)
	r.start, r.resumed = c.node, at
	c.root.parent.vars, c.root.vars = vars, maps.Clone(c.before)
	for name, v := range c.before {
		if list, ok := v.([]Value); ok {
			c.root.vars[name] = c.messages[len(c.messages)-len(list) : n]
		}
	}
	c.t.body(r, c.root)
	return c.points[at].out, r.out.String(), nil
}

// ends reports whether a list is the messages or the last ones of them. Lists do not change, and share their memory.
func (c *Trace) ends(list []Value) bool {
	n := len(c.messages)
	return len(list) > 0 && n > 0 && &list[len(list)-1] == &c.messages[n-1]
}

// see notes that the rendering depends on the first n values of a list: longer prefixes begin alike.
func (r *run) see(v Value, n int) {
	if list, ok := v.([]Value); ok && r.trace.ends(list) {
		r.seen = max(r.seen, n+len(r.trace.messages)-len(list))
	}
}

// enter returns the first iteration of a loop. It prepares points if this is the loop over the messages.
func (r *run) enter(items []Value) (at int) {
	c := r.trace
	switch {
	case !c.ends(items):
		at, r.resumed = r.resumed, 0
	case r.node < 0 || c.before != nil || c.t.Spans:
		r.see(items, everything)
	default:
		c.node, c.skipped, c.before = r.node, len(c.messages)-len(items), maps.Clone(c.root.vars)
		for _, v := range c.before {
			if !c.keeps(v) {
				r.see(items, everything)
			}
		}
	}
	return at
}

// keeps reports whether the loop leaves a variable before it alone.
func (c *Trace) keeps(v Value) bool {
	switch v := v.(type) {
	case nil, bool, int, float64, bigInt, notFinite, string, undefined, *function:
		return true
	case []Value:
		return c.ends(v)
	}
	return false
}

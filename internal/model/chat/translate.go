package chat

import (
	"fmt"
	"slices"
	"strings"
)

// A translator rewrites a template for the engine. The engine evaluates names, literals, calls, operators and control
// flow as Jinja2 does. It differs silently in white space, attributes, tests, filters, methods and the scope of loops;
// all of these become calls of functions of this package.
type translator struct {
	segs  []segment
	at    int
	out   strings.Builder
	depth int
	saved int // variables saved before loops
	spans bool
	line  int
}

// maxNesting bounds blocks and brackets inside each other.
const maxNesting = 60

// A block is a statement with its body, or a text or expression.
type block struct {
	segment
	tag  string
	body []block // up to the end of the block, or to the next branch
	next []block // the branches elif and else
}

// ends lists the statements that end a block.
var ends = map[string][]string{
	"if": {"elif", "else", "endif"}, "elif": {"elif", "else", "endif"}, "for": {"else", "endfor"},
	"macro": {"endmacro"}, "call": {"endcall"}, "generation": {"endgeneration"}, "set": {"endset"},
}

func translate(src string) (out string, spans bool, err error) {
	segs, err := lex(src)
	if err != nil {
		return "", false, err
	}
	t := &translator{segs: segs}
	blocks, _, err := t.parse(nil)
	if err == nil {
		err = t.blocks(blocks, "")
	}
	if err != nil {
		return "", false, fmt.Errorf("line %d: %w", t.line, err)
	}
	return t.out.String(), t.spans, nil
}

// parse reads blocks up to one of the statements, and returns its name.
func (t *translator) parse(until []string) (list []block, end string, err error) {
	if t.depth++; t.depth > maxNesting {
		return nil, "", fmt.Errorf("more than %d blocks inside each other", maxNesting)
	}
	defer func() { t.depth-- }()
	for t.at < len(t.segs) {
		b := block{segment: t.segs[t.at]}
		t.line = b.line
		if b.kind == '%' {
			if len(b.toks) == 0 || b.toks[0].kind != 'n' {
				return nil, "", fmt.Errorf("a statement without a name")
			}
			b.tag = b.toks[0].text
		}
		if slices.Contains(until, b.tag) {
			return list, b.tag, nil
		}
		t.at++
		stops := ends[b.tag]
		if b.tag == "set" && slices.ContainsFunc(b.toks, func(x tok) bool { return x.is("=") }) {
			stops = nil
		}
		if stops != nil {
			if err := t.parseBody(&b, stops); err != nil {
				return nil, "", err
			}
		}
		list = append(list, b)
	}
	if until != nil {
		return nil, "", fmt.Errorf("%s is missing", until[len(until)-1])
	}
	return list, "", nil
}

func (t *translator) parseBody(b *block, stops []string) (err error) {
	var end string
	if b.body, end, err = t.parse(stops); err != nil {
		return err
	}
	last := stops[len(stops)-1]
	for end != last {
		branch := block{segment: t.segs[t.at], tag: end}
		if t.at++; end == "else" {
			stops = []string{last}
		}
		if branch.body, end, err = t.parse(stops); err != nil {
			return err
		}
		b.next = append(b.next, branch)
	}
	t.at++
	return nil
}

func (t *translator) blocks(list []block, loop string) error {
	for _, b := range list {
		t.line = b.line
		if err := t.block(b, loop); err != nil {
			return err
		}
	}
	return nil
}

// block writes a block. loop names the innermost statement around it: for, macro, call or none.
func (t *translator) block(b block, loop string) (err error) {
	switch b.tag {
	case "":
		text := literal(b.text)
		if b.kind == '{' {
			if text, err = t.expr(b.toks); err != nil {
				return err
			}
		}
		t.write("{{ __out(", text, ") }}")
	case "if":
		return t.ifBlock(b, loop)
	case "for":
		return t.forBlock(b)
	case "set":
		return t.set(b)
	case "macro":
		return t.macro(b)
	case "call", "generation":
		return t.call(b)
	case "break", "continue":
		if len(b.toks) != 1 || loop != "for" {
			return fmt.Errorf("%s is not in a loop", b.tag)
		}
		t.write("{% ", b.tag, " %}")
	default:
		return fmt.Errorf("the statement %q is not read", b.tag)
	}
	return nil
}

func (t *translator) write(parts ...string) {
	for _, p := range parts {
		t.out.WriteString(p)
	}
}

func (t *translator) ifBlock(b block, loop string) error {
	for _, branch := range append([]block{b}, b.next...) {
		t.line = branch.line
		if branch.tag == "else" {
			t.write("{% else %}")
		} else {
			cond, err := t.expr(branch.toks[1:])
			if err != nil {
				return err
			}
			t.write("{% ", branch.tag, " ", cond, " %}")
		}
		if err := t.blocks(branch.body, loop); err != nil {
			return err
		}
	}
	t.write("{% endif %}")
	return nil
}

// forBlock writes a loop. In the engine, a variable that a pass sets keeps its value in the next pass; in Jinja2 each
// pass begins with the value of before the loop.
func (t *translator) forBlock(b block) error {
	in := find(b.toks, "in")
	if in < 0 {
		return fmt.Errorf("a loop without in")
	}
	targets, err := names(b.toks[1:in])
	if err != nil || len(targets) > 2 || len(targets) == 0 {
		return fmt.Errorf("a loop has one or two variables")
	}
	over, filter := b.toks[in+1:], ""
	if k := find(over, "if"); k >= 0 {
		if filter, err = t.expr(over[k+1:]); err != nil {
			return err
		}
		filter, over = " if "+filter, over[:k]
	}
	items, err := t.expr(over)
	if err != nil {
		return err
	}
	t.saved++
	var restore strings.Builder
	for _, name := range assigned(b.body, nil) {
		if !slices.Contains(targets, name) {
			save := fmt.Sprintf("__saved_%d_%s", t.saved, name)
			t.write("{% set ", save, " = ", name, " %}")
			fmt.Fprintf(&restore, "{%% set %s = %s %%}", name, save)
		}
	}
	t.write("{% for ", strings.Join(targets, ", "), " in __each(", items, ", ", fmt.Sprint(len(targets)), ")", filter,
		" %}", restore.String())
	if err := t.blocks(b.body, "for"); err != nil {
		return err
	}
	for _, branch := range b.next {
		t.write("{% else %}")
		if err := t.blocks(branch.body, ""); err != nil {
			return err
		}
	}
	t.write("{% endfor %}")
	return nil
}

// assigned lists the variables that blocks set, except inside inner scopes.
func assigned(list []block, set []string) []string {
	for _, b := range list {
		switch b.tag {
		case "set", "macro":
			if len(b.toks) > 1 && !slices.Contains(set, b.toks[1].text) && !(len(b.toks) > 2 && b.toks[2].is(".")) {
				set = append(set, b.toks[1].text)
			}
		case "if":
			set = assigned(b.body, set)
			for _, branch := range b.next {
				set = assigned(branch.body, set)
			}
		}
	}
	return set
}

func (t *translator) set(b block) error {
	eq := find(b.toks, "=")
	if eq < 0 {
		target, err := names(b.toks[1:])
		if err != nil || len(target) != 1 {
			return fmt.Errorf("a set block takes one name")
		}
		t.write("{% set ", target[0], " %}")
		if err := t.blocks(b.body, ""); err != nil {
			return err
		}
		t.write("{% endset %}")
		return nil
	}
	value, err := t.expr(b.toks[eq+1:])
	if err != nil {
		return err
	}
	target, attr := b.toks[1:eq], ""
	if len(target) == 3 && target[1].is(".") && target[2].kind == 'n' {
		attr, target = target[2].text, target[:1]
	}
	name, err := names(target)
	if err != nil || len(name) != 1 {
		return fmt.Errorf("set takes one name")
	}
	if attr != "" {
		t.write("{% set ", name[0], ".", attr, " = __member(", value, ", ", name[0], ", ", literal(attr), ") %}")
	} else {
		t.write("{% set ", name[0], " = __keep(", value, ") %}")
	}
	return nil
}

func (t *translator) macro(b block) error {
	if len(b.toks) < 4 || b.toks[1].kind != 'n' || !b.toks[2].is("(") || !b.toks[len(b.toks)-1].is(")") {
		return fmt.Errorf("a macro without a name or a list of parameters")
	}
	var params []string
	var start strings.Builder
	for rest := b.toks[3 : len(b.toks)-1]; len(rest) > 0; {
		end := find(rest, ",")
		if end < 0 {
			end = len(rest)
		}
		name, err := names(rest[:1])
		if err != nil || end == 2 || end > 2 && !rest[1].is("=") {
			return fmt.Errorf("a parameter is a name, or a name = value")
		}
		params = append(params, name[0])
		if end > 2 {
			value, err := t.expr(rest[2:end])
			if err != nil {
				return err
			}
			fmt.Fprintf(&start, "{%% if %s|__is_undefined %%}{%% set %[1]s = %[2]s %%}{%% endif %%}", name[0], value)
		}
		fmt.Fprintf(&start, "{%% set %s = __keep(%[1]s) %%}", name[0])
		rest = rest[min(end+1, len(rest)):]
	}
	t.write("{% macro ", b.toks[1].text, "(", strings.Join(params, ", "), ") %}{{ __enter() }}", start.String())
	if err := t.blocks(b.body, "macro"); err != nil {
		return err
	}
	t.write("{{ __leave() }}{% endmacro %}")
	return nil
}

// call writes {% call %}, and {% generation %} as one of a function that marks its text.
func (t *translator) call(b block) error {
	head := "call __generation()"
	if b.tag == "generation" {
		if len(b.toks) != 1 {
			return fmt.Errorf("generation takes no arguments")
		}
		t.spans = true
	} else {
		toks := b.toks[1:]
		if head = "call"; len(toks) > 0 && toks[0].is("(") {
			end := match(toks, 0)
			params, err := names(toks[1:max(end, 1)])
			if err != nil || end < 0 {
				return fmt.Errorf("the parameters of call are names")
			}
			head, toks = "call("+strings.Join(params, ", ")+")", toks[end+1:]
		}
		if len(toks) < 3 || toks[0].kind != 'n' || !toks[1].is("(") || match(toks, 1) != len(toks)-1 {
			return fmt.Errorf("call takes a macro with its arguments")
		}
		value, err := t.expr(toks)
		if err != nil {
			return err
		}
		head += " " + value
	}
	t.write("{% ", head, " %}")
	if err := t.blocks(b.body, "call"); err != nil {
		return err
	}
	t.write("{% endcall %}")
	return nil
}

// find returns the place of a name or operator outside brackets; -1: none.
func find(toks []tok, text string) int {
	depth := 0
	for i, x := range toks {
		switch {
		case depth == 0 && x.is(text):
			return i
		case x.is("("), x.is("["), x.is("{"):
			depth++
		case x.is(")"), x.is("]"), x.is("}"):
			depth--
		}
	}
	return -1
}

// match returns the place of the bracket that closes one; -1: none.
func match(toks []tok, open int) int {
	pairs := map[string]string{"(": ")", "[": "]", "{": "}"}
	var stack []string
	for i := open; i < len(toks); i++ {
		x := toks[i]
		if x.kind != 'o' {
			continue
		}
		if close, ok := pairs[x.text]; ok {
			stack = append(stack, close)
		} else if strings.Contains(")]}", x.text) {
			if stack[len(stack)-1] != x.text {
				return -1
			}
			if stack = stack[:len(stack)-1]; len(stack) == 0 {
				return i
			}
		}
	}
	return -1
}

// names reads names with commas between them.
func names(toks []tok) (list []string, err error) {
	for i, x := range toks {
		if i%2 == 0 && (x.kind != 'n' || slices.Contains(words, x.text) || strings.HasPrefix(x.text, "__")) ||
			i%2 == 1 && !x.is(",") {
			return nil, fmt.Errorf("%q is not a name here", x.text)
		}
		if i%2 == 0 {
			list = append(list, x.text)
		}
	}
	return list, nil
}

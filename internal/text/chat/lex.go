package chat

import (
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// A segment is a text, an expression ({{) or a statement ({%) of a template. White space around tags is removed by the
// rules of Jinja2 with trim_blocks and lstrip_blocks.
type segment struct {
	kind byte // 't', '{' or '%'
	text string
	toks []tok
	line int
}

// A tok is a name, number, string, operator or the end of a tag.
type tok struct {
	kind byte // 'n', '0', 's', 'o' or 0
	text string
}

// maxTokens bounds the tokens of a tag, since an evaluation recurses over them; MaxTemplate bounds a template's bytes.
const (
	maxTokens   = 2000
	MaxTemplate = 1 << 20
)

const space = `[\s\v\x1c-\x1f\x{85}\pZ]`

var (
	tagBegin = regexp.MustCompile(`\{[{%#][-+]?`)
	tagEnd   = map[byte]*regexp.Regexp{'{': regexp.MustCompile(`^(-?)\}\}`), '%': regexp.MustCompile(`^([-+]?)%\}`),
		'#': regexp.MustCompile(`(?s)^.*?([-+]?)#\}`)}
	rawBegin = regexp.MustCompile(`^` + space + `*raw` + space + `*(-?)%\}`)
	rawEnd   = regexp.MustCompile(`(?s)^(.*?)\{%([-+]?)` + space + `*endraw` + space + `*([-+]?)%\}`)
	token    = regexp.MustCompile(`^(?:(` + space + `+)|('(?s:[^'\\]|\\.)*'|"(?s:[^"\\]|\\.)*")|` +
		`(\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)|([A-Za-z_]\w*)|(//|\*\*|[=!<>]=|[-+/*%~()[\]{}<>=.:|,]))`)
	escape = regexp.MustCompile(`(?s)\\(?:x.{2}|u.{4}|U.{8}|.)`)
)

// A lexer cuts a template into segments.
type lexer struct {
	src       string // the rest
	line      int
	lineStart bool // the rest begins a line
	segs      []segment
}

func (l *lexer) lex(src string) {
	if len(src) > MaxTemplate {
		fail("%d bytes; at most %d are read", len(src), MaxTemplate)
	}
	if !utf8.ValidString(src) || strings.ContainsAny(src, mark+endMark) {
		fail("not UTF-8, or with the characters U+FDD0 or U+FDD1")
	}
	src = strings.ReplaceAll(strings.ReplaceAll(src, "\r\n", "\n"), "\r", "\n")
	l.src, l.line, l.lineStart = strings.TrimSuffix(src, "\n"), 1, true
	for l.src != "" {
		l.next()
	}
}

// next reads a text and the tag after it.
func (l *lexer) next() {
	at := tagBegin.FindStringIndex(l.src)
	if at == nil {
		l.add(l.src)
		l.src = ""
		return
	}
	kind := l.src[at[0]+1]
	l.add(l.trimmed(l.src[:at[0]], kind, l.src[at[0]+2:at[1]]))
	l.pass(at[1], "", false)
	m := rawBegin.FindStringSubmatch(l.src)
	switch {
	case kind == '#':
		m = l.find(tagEnd[kind], "the comment has no end")
		l.pass(len(m[0]), m[1], true)
	case kind == '%' && m != nil:
		l.pass(len(m[0]), m[1], false)
		m = l.find(rawEnd, "the raw block has no end")
		l.add(l.trimmed(m[1], kind, m[2]))
		l.pass(len(m[0]), m[3], true)
	default:
		l.segs = append(l.segs, segment{kind: kind, line: l.line})
		l.segs[len(l.segs)-1].toks = l.tag(kind)
	}
}

func (l *lexer) find(re *regexp.Regexp, absent string) []string {
	m := re.FindStringSubmatch(l.src)
	if m == nil {
		fail("%s: %.20q", absent, l.src)
	}
	return m
}

func (l *lexer) add(text string) {
	if text != "" {
		l.segs = append(l.segs, segment{kind: 't', text: text, line: l.line})
	}
}

// trimmed removes white space before a tag.
func (l *lexer) trimmed(text string, kind byte, sign string) string {
	if sign == "-" {
		return strings.TrimRightFunc(text, isSpace)
	}
	if at := strings.LastIndexByte(text, '\n') + 1; sign == "" && kind != '{' && (at > 0 || l.lineStart) &&
		strings.TrimFunc(text[at:], isSpace) == "" {
		return text[:at]
	}
	return text
}

// pass passes n bytes, and the white space that a tag's end removes.
func (l *lexer) pass(n int, sign string, newline bool) {
	rest := l.src[n:]
	if sign == "-" {
		rest = strings.TrimLeftFunc(rest, isSpace)
	} else if sign == "" && newline {
		rest = strings.TrimPrefix(rest, "\n")
	}
	passed := l.src[:len(l.src)-len(rest)]
	l.line += strings.Count(passed, "\n")
	l.lineStart = strings.HasSuffix(passed, "\n")
	l.src = rest
}

// tag reads the tokens of a tag. An empty one stands for its end.
func (l *lexer) tag(kind byte) (toks []tok) {
	for depth := 0; ; {
		if m := tagEnd[kind].FindStringSubmatch(l.src); m != nil && depth == 0 {
			l.pass(len(m[0]), m[1], kind == '%')
			return append(toks, tok{})
		}
		m := l.find(token, "the tag has no end, or a string in it, or an unexpected character")
		l.pass(len(m[0]), "", false)
		group := 1 + slices.IndexFunc(m[1:], func(s string) bool { return s != "" })
		t := tok{" s0no"[group-1], m[0]}
		switch {
		case t.kind == ' ':
			continue
		case t.kind == 's':
			t.text = unquote(t.text)
		case strings.Contains("([{", t.text):
			depth++
		case strings.Contains(")]}", t.text):
			depth--
		}
		if last := len(toks) - 1; t.kind == 's' && last >= 0 && toks[last].kind == 's' { // neighbours are one string
			toks[last].text += t.text
		} else {
			toks = append(toks, t)
		}
		if len(toks) > maxTokens || depth < 0 {
			fail("a tag with more than %d tokens, or with a bracket too many", maxTokens)
		}
	}
}

// unquote reads a string with Python's escapes.
func unquote(s string) string {
	return escape.ReplaceAllStringFunc(s[1:len(s)-1], func(e string) string {
		if k := strings.IndexByte("\nabfnrtv\\'\"", e[1]); k >= 0 {
			return []string{"", "\a", "\b", "\f", "\n", "\r", "\t", "\v", "\\", "'", "\""}[k]
		}
		r, err := strconv.ParseUint(e[2:], 16, 31)
		if !strings.ContainsAny(e[1:2], "xuUN01234567") {
			return e
		}
		if err != nil || !utf8.ValidRune(rune(r)) {
			fail("the escape %s is not read", e)
		}
		return string(rune(r))
	})
}

// isSpace reports white space as Python counts it.
func isSpace(r rune) bool { return unicode.IsSpace(r) || r >= 0x1c && r <= 0x1f }

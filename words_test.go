package cprun_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// selfExplaining lists methods with a fixed meaning: a comment would repeat the name.
var selfExplaining = []string{"String", "Error", "Unwrap", "MarshalJSON", "UnmarshalJSON"}

// articles may come before a type's name: "A Kernel computes ...".
var articles = []string{"A", "An", "The"}

// TestExamplesInCommentsNameWhatExists checks that the examples in package comments name what packages export.
func TestExamplesInCommentsNameWhatExists(t *testing.T) {
	exported, examples := map[string]map[string]bool{}, map[string]string{} // by package; by path
	walk(t, func(path string, src []byte) {
		file, err := parser.ParseFile(token.NewFileSet(), path, src, parser.ParseComments)
		if err != nil || strings.HasSuffix(path, "_test.go") {
			return
		}
		name := file.Name.Name
		if exported[name] == nil {
			exported[name] = map[string]bool{}
		}
		for _, decl := range file.Decls {
			switch d := decl.(type) {
			case *ast.FuncDecl:
				exported[name][d.Name.Name] = true
			case *ast.GenDecl:
				for _, spec := range d.Specs {
					switch s := spec.(type) {
					case *ast.TypeSpec:
						exported[name][s.Name.Name] = true
					case *ast.ValueSpec:
						for _, ident := range s.Names {
							exported[name][ident.Name] = true
						}
					}
				}
			}
		}
		for line := range strings.Lines(file.Doc.Text()) {
			if strings.HasPrefix(line, "\t") {
				examples[path] += line
			}
		}
	})
	for path, text := range examples {
		for _, m := range regexp.MustCompile(`\b([a-z]\w*)\.([A-Z]\w*)`).FindAllStringSubmatch(text, -1) {
			if names := exported[m[1]]; names != nil && !names[m[2]] {
				t.Errorf("%s: the package comment shows %s, which does not exist", path, m[0])
			}
		}
	}
}

// TestCommentsBeginWithTheirName checks Go's conventions. The comment of an exported function or method begins with its
// name and a verb: "New returns ...", not "New is ...". The comment of an exported type, constant or variable begins with
// its name. Groups of constants or variables, fields of exported structs and methods of exported interfaces have a
// comment.
func TestCommentsBeginWithTheirName(t *testing.T) {
	walk(t, func(file string, src []byte) {
		if strings.HasSuffix(file, "_test.go") {
			return
		}
		files := token.NewFileSet()
		f, err := parser.ParseFile(files, file, src, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			t.Error(err)
			return
		}
		w := words{files: files, report: func(pos token.Pos, fault string) { t.Errorf("%s: %s", files.Position(pos), fault) }}
		for _, d := range f.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				if fault := commentFault(d); d.Name.IsExported() && fault != "" {
					w.report(d.Pos(), fault)
				}
			case *ast.GenDecl:
				w.declaration(d)
			}
		}
	})
}

// words checks the comments of one file's declarations.
type words struct {
	files  *token.FileSet
	report func(pos token.Pos, fault string)
}

// declaration checks the types, or the constants or variables, of d.
func (w words) declaration(d *ast.GenDecl) {
	for _, spec := range d.Specs {
		switch s := spec.(type) {
		case *ast.TypeSpec:
			w.typ(s, first(s.Doc, d.Doc, s.Comment))
		case *ast.ValueSpec:
			w.value(s, d)
		}
	}
}

// typ checks the comment of an exported type, and those of its fields or methods.
func (w words) typ(s *ast.TypeSpec, doc *ast.CommentGroup) {
	if !s.Name.IsExported() {
		return
	}
	if !names(doc, s.Name.Name) {
		w.report(s.Pos(), "the comment of type "+s.Name.Name+" does not begin with its name")
	}
	switch x := s.Type.(type) {
	case *ast.StructType:
		w.members(s.Name.Name, x.Fields.List, doc)
	case *ast.InterfaceType:
		w.members(s.Name.Name, x.Methods.List, doc)
	}
}

// members checks that each exported field or method has a comment in its paragraph of lines, or that its type's comment
// names it. The arguments of a kernel are explained in the .cu file that the comment of their struct names.
func (w words) members(owner string, list []*ast.Field, doc *ast.CommentGroup) {
	if strings.Contains(doc.Text(), ".cu") {
		return
	}
	said, last := false, -1
	var open []*ast.Field
	flush := func() {
		for _, f := range open {
			if !said && !regexp.MustCompile(`(?i)\b`+f.Names[0].Name+`\b`).MatchString(doc.Text()) {
				w.report(f.Pos(), owner+"."+f.Names[0].Name+" has no comment")
			}
		}
		open, said = nil, false
	}
	for _, f := range list {
		begin := w.files.Position(f.Pos()).Line
		if f.Doc != nil {
			begin = w.files.Position(f.Doc.Pos()).Line
		}
		if begin > last+1 {
			flush()
		}
		said = said || f.Doc != nil || f.Comment != nil
		if len(f.Names) > 0 && f.Names[0].IsExported() {
			open = append(open, f)
		}
		last = w.files.Position(f.End()).Line
	}
	flush()
}

// value checks constants and variables. The comment of a single one begins with its name; a group has a comment, or each of
// its lines does.
func (w words) value(s *ast.ValueSpec, d *ast.GenDecl) {
	if !s.Names[0].IsExported() {
		return
	}
	name := s.Names[0].Name
	switch doc := first(s.Doc, s.Comment); {
	case !d.Lparen.IsValid() && !names(d.Doc, name):
		w.report(s.Pos(), "the comment of "+name+" does not begin with its name")
	case d.Lparen.IsValid() && d.Doc == nil && doc == nil:
		w.report(s.Pos(), name+" has no comment, nor has its group")
	case d.Lparen.IsValid() && s.Doc != nil && !names(s.Doc, name):
		w.report(s.Pos(), "the comment of "+name+" does not begin with its name")
	}
}

// first returns the first comment that is not nil.
func first(groups ...*ast.CommentGroup) *ast.CommentGroup {
	for _, g := range groups {
		if g != nil {
			return g
		}
	}
	return nil
}

// names reports whether doc begins with name, after an optional article.
func names(doc *ast.CommentGroup, name string) bool {
	w := strings.Fields(doc.Text())
	if len(w) > 1 && slices.Contains(articles, w[0]) {
		w = w[1:]
	}
	return len(w) > 0 && strings.TrimRight(w[0], ",.:") == name
}

// stumbles lists phrases that are hard to read, each with a plain form.
var stumbles = []struct {
	found *regexp.Regexp
	plain string
}{
	{regexp.MustCompile(`\b(is|are|was|were) what\b`), "name the thing: a noun for the clause"},
	{regexp.MustCompile(`(^|[.;:] )Who [a-z]`), "name the actor: the reader, a rank"},
	{regexp.MustCompile(`\bbehind (it|them|the|a|an|this|that|those|what)\b`), "after, under or inside"},
}

// TestProseIsPlain keeps stumbles out of comments and docs, except the log.
func TestProseIsPlain(t *testing.T) {
	check := func(at string, line string) {
		for _, s := range stumbles {
			if m := s.found.FindString(line); m != "" {
				t.Errorf("%s: %q: %s", at, strings.TrimSpace(m), s.plain)
			}
		}
	}
	walk(t, func(file string, src []byte) {
		for i, line := range strings.Split(string(src), "\n") {
			if _, comment, found := strings.Cut(line, "// "); found && file != "words_test.go" {
				check(fmt.Sprintf("%s:%d", file, i+1), comment)
			}
		}
	})
	for _, page := range pages(t) {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for i, line := range strings.Split(string(text), "\n") {
			if page != "docs/log.md" {
				check(fmt.Sprintf("%s:%d", page, i+1), line)
			}
		}
	}
}

// TestFunctionsBeginWithAVerb checks that in the comments of all functions a verb follows the name.
func TestFunctionsBeginWithAVerb(t *testing.T) {
	walk(t, func(file string, src []byte) {
		files := token.NewFileSet()
		f, err := parser.ParseFile(files, file, src, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			t.Error(err)
			return
		}
		for _, d := range f.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok {
				continue
			}
			words := strings.Fields(fn.Doc.Text())
			if len(words) > 1 && words[0] == fn.Name.Name && slices.Contains([]string{"is", "are", "has", "says", "tells"}, words[1]) {
				t.Errorf("%s: the comment of %s begins with %q; begin with what it does", files.Position(fn.Pos()), words[0], words[1])
			}
		}
	})
}

// commentFault returns the fault of an exported function's comment, or "".
func commentFault(fn *ast.FuncDecl) string {
	name, words := fn.Name.Name, strings.Fields(fn.Doc.Text())
	switch {
	case len(words) == 0 && (hidden(fn) || slices.Contains(selfExplaining, name)):
		return "" // its interface has the comment
	case len(words) == 0:
		return name + " has no comment"
	case words[0] != name:
		return name + "'s comment begins with " + words[0]
	case len(words) > 1 && (words[1] == "is" || words[1] == "are"):
		return name + "'s comment says what it " + words[1] + ", not what it does"
	}
	return ""
}

// hidden reports whether fn is a method of an unexported type.
func hidden(fn *ast.FuncDecl) bool {
	if fn.Recv == nil {
		return false
	}
	receiver := fn.Recv.List[0].Type
	for {
		switch x := receiver.(type) {
		case *ast.StarExpr:
			receiver = x.X
		case *ast.IndexExpr:
			receiver = x.X
		case *ast.IndexListExpr:
			receiver = x.X
		case *ast.Ident:
			return !x.IsExported()
		default:
			return false
		}
	}
}

// TestLinesFit checks that no line of code is longer than 120 columns. A tab counts as one.
func TestLinesFit(t *testing.T) {
	walk(t, func(file string, src []byte) {
		for i, line := range strings.Split(string(src), "\n") {
			if !strings.HasSuffix(file, "_test.go") && utf8.RuneCountInString(line) > 120 {
				t.Errorf("%s:%d has more than 120 columns", file, i+1)
			}
		}
	})
}

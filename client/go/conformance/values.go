package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Values of cases and results: string, bool, nil, number, []any, object; and []byte for
// cursors, which only travel from a result to an argument.
type (
	object = map[string]any
	number = json.Number
)

func num[N ~uint64 | ~int64 | ~int](n N) number {
	if n < 0 {
		return number(strconv.FormatInt(int64(n), 10))
	}
	return number(strconv.FormatUint(uint64(n), 10))
}

// names holds the values of references.
type names struct {
	prefix string
	kept   object
}

func (n names) with(name string, value any) names {
	kept := maps.Clone(n.kept)
	kept[name] = value
	return names{n.prefix, kept}
}

var reference = regexp.MustCompile(`\$\{([^}]*)\}`)

// resolve puts the values of references, sums and lists in their places.
func (n names) resolve(value any) (any, error) {
	switch value := value.(type) {
	case string:
		return n.resolveString(value)
	case []any:
		list := make([]any, len(value))
		for i, element := range value {
			resolved, err := n.resolve(element)
			if err != nil {
				return nil, err
			}
			list[i] = resolved
		}
		return list, nil
	case object:
		if each, ok := value["each"]; ok && len(value) == 2 {
			return n.list(value["times"], each)
		}
		members := make(object, len(value))
		for name, member := range value {
			resolved, err := n.resolve(member)
			if err != nil {
				return nil, err
			}
			members[name] = resolved
		}
		if terms, ok := members["add"].([]any); ok && len(members) == 1 {
			return sum(terms)
		}
		return members, nil
	}
	return value, nil
}

// list is the list in which each stands times times, with its count as ${i}.
func (n names) list(times, each any) (any, error) {
	count, ok := times.(number)
	if !ok {
		return nil, errors.New("`each` needs `times`")
	}
	length, err := count.Int64()
	if err != nil {
		return nil, err
	}
	list := make([]any, length)
	for i := range list {
		if list[i], err = n.with("i", num(i)).resolve(each); err != nil {
			return nil, err
		}
	}
	return list, nil
}

func sum(terms []any) (any, error) {
	var total int64
	for _, term := range terms {
		n, ok := term.(number)
		if !ok {
			return nil, fmt.Errorf("%v cannot be added", term)
		}
		summand, err := n.Int64()
		if err != nil {
			return nil, err
		}
		total += summand
	}
	return num(total), nil
}

func (n names) resolveString(text string) (any, error) {
	found := reference.FindStringSubmatch(text)
	if found != nil && found[0] == text {
		return n.lookUp(found[1])
	}
	var failure error
	replaced := reference.ReplaceAllStringFunc(text, func(whole string) string {
		value, err := n.lookUp(whole[2 : len(whole)-1])
		if err != nil {
			failure = err
		}
		return fmt.Sprint(value)
	})
	return replaced, failure
}

func (n names) lookUp(path string) (any, error) {
	if name, isLog := strings.CutPrefix(path, "log:"); isLog {
		return n.prefix + name, nil
	}
	var value any = n.kept
	for _, name := range strings.Split(path, ".") {
		switch container := value.(type) {
		case object:
			member, there := container[name]
			if !there {
				return nil, fmt.Errorf("${%s}: there is no %s", path, name)
			}
			value = member
		case []any:
			index, err := strconv.Atoi(name)
			if err != nil || index < 0 || index >= len(container) {
				return nil, fmt.Errorf("${%s}: there is no %s", path, name)
			}
			value = container[index]
		default:
			return nil, fmt.Errorf("${%s}: there is no %s", path, name)
		}
	}
	return value, nil
}

// differ compares the actual value with the expected one. Empty: they are equal.
func differ(where string, expected, actual any) string {
	switch expected := expected.(type) {
	case string:
		if expected == "*" && actual != nil {
			return ""
		}
	case object:
		return differObject(where, expected, actual)
	case []any:
		list, ok := actual.([]any)
		if !ok || len(list) != len(expected) {
			return fmt.Sprintf("%s: expected %.300s, got %.300s", where, show(expected), show(actual))
		}
		for i := range expected {
			if difference := differ(fmt.Sprintf("%s.%d", where, i), expected[i], list[i]); difference != "" {
				return difference
			}
		}
		return ""
	}
	if show(expected) != show(actual) {
		return fmt.Sprintf("%s: expected %s, got %s", where, show(expected), show(actual))
	}
	return ""
}

func differObject(where string, expected object, actual any) string {
	if len(expected) == 1 {
		for name, bound := range expected {
			if matches, known := matchers[name]; known {
				if !matches(bound, actual) {
					return fmt.Sprintf("%s: expected %s, got %s", where, show(expected), show(actual))
				}
				return ""
			}
		}
	}
	members, ok := actual.(object)
	if !ok {
		return fmt.Sprintf("%s: expected %s, got %s", where, show(expected), show(actual))
	}
	for _, name := range slices.Sorted(maps.Keys(expected)) {
		inner := name
		if where != "" {
			inner = where + "." + name
		}
		if difference := differ(inner, expected[name], members[name]); difference != "" {
			return difference
		}
	}
	return ""
}

var matchers = map[string]func(bound, actual any) bool{
	"at_least": func(bound, actual any) bool { return compares(bound, actual, func(b, a int64) bool { return a >= b }) },
	"below":    func(bound, actual any) bool { return compares(bound, actual, func(b, a int64) bool { return a < b }) },
	"length": func(bound, actual any) bool {
		list, ok := actual.([]any)
		return ok && show(bound) == strconv.Itoa(len(list))
	},
}

func compares(bound, actual any, holds func(bound, actual int64) bool) bool {
	b, isNumber := bound.(number)
	a, areNumbers := actual.(number)
	if !isNumber || !areNumbers {
		return false
	}
	limit, err := b.Int64()
	value, failure := a.Int64()
	return err == nil && failure == nil && holds(limit, value)
}

// show is a value as JSON.
func show(value any) string {
	text, err := json.Marshal(value)
	if err != nil {
		return fmt.Sprint(value)
	}
	return string(text)
}

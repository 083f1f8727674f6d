"""The productions of the story grammar: everything that a story can say.

`RULES` maps a symbol to its alternatives, all equally likely (an alternative written twice is twice as likely). In an
alternative, `{symbol}` stands for another rule, `{slot}` for the item that a story has in that slot of its cast and
`{slot.form}` for one of its forms (see `story_cast`). `story_grammar` walks these productions forwards to tell a story
and backwards to recognise a sentence.
"""

from collections.abc import Mapping


def _rules(text: str) -> Mapping[str, tuple[str, ...]]:
    """Parse rules: `symbol:` on its own line, its alternatives indented below, one per line or separated by bars."""
    rules: dict[str, tuple[str, ...]] = {}
    for line in text.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            symbol = line[:-1]
            rules[symbol] = ()
        elif line.startswith(" "):
            rules[symbol] += tuple(part.strip() for part in line.split("|") if part.strip())
    return rules


RULES = _rules(r"""
# Phrases.
once:
    Once upon a time | Once upon a time | Once upon a time | Once upon a time | Once upon a time | Once upon a time |
    Long ago | Many years ago | Once
moment:
    one morning | one day | one evening | one fine day | early one morning | one cold day | one sunny afternoon |
    on a rainy day | on the first day of spring | at the end of the summer
who:
    {hero} | {hero} | {hero.he} | the {kind} | the {trait} {kind}
name:
    {hero} | {hero} | the {kind} | {hero} the {kind}
other:
    {friend} | {friend} | the {fkind} | the {ftrait} {fkind}
new:
    {ftrait.a} {fkind} named {friend} | {fkind.a} named {friend} | {friend}, {ftrait.a} {fkind},
sky:
    the sun was shining | the sky was blue and clear | a soft rain was falling | a cold wind was blowing |
    snow covered the roofs | grey clouds hung over the hills | the birds were singing | the air smelled of {scent}
scent:
    flowers | rain | fresh bread | the sea | autumn leaves
manner:
    slowly | bravely | quickly | quietly | carefully | all alone | with a happy heart | without fear
hours:
    all day | for hours | for a long time | until the sun went down | from morning to night
sadly:
    sadly | in a small voice | with tears in {hero.his} eyes | and sighed
kindly:
    kindly | with a smile | in a warm voice | at once | and laughed
lesson:
    true friends always help each other | patience is worth more than gold | a kind word can open any door |
    it is never too late to say sorry | asking for help takes courage | great journeys begin with a small step |
    home is where your friends are | mistakes are the best teachers | the best treasures cannot be bought |
    a little light can drive away the dark | every storm ends one day | sharing makes every meal taste better
# The beginning.
opening:
    {once}, there was {trait.a} {kind} named {hero}.
    {once}, there was {trait.a} {kind} named {hero} who lived {home}.
    {once}, there was {trait.a} {kind} named {hero}.
    {once}, there was {trait.a} {kind} named {hero} who lived {home}.
    {once}, {trait.a} {kind} named {hero} lived {home}.
    {once}, {home}, there lived {trait.a} {kind} called {hero}.
    {once}, there lived {kind.a} named {hero}, and everyone knew that {hero.he} was {trait}.
    {home}, there lived {trait.a} {kind} named {hero}.
    {home} lived {kind.a} named {hero}, who was very {trait}.
    {moment}, {trait.a} {kind} named {hero} woke up early and looked out of the window.
    {moment}, while {sky}, {trait.a} {kind} named {hero} sat {home}.
    {hero} was {trait.a} {kind} who lived {home}.
    This is the story of {hero}, {trait.a} {kind} who lived {home}.
nature:
    {hero} loved {food} and long walks.
    {hero.he} was never in a bad mood, and {hero.his} neighbors liked {hero.him} very much.
    {who} liked to sit by the window and dream of {place}.
    Every evening, {who} drank a cup of tea and watched the moon.
    Nobody could make better {food} than {hero}.
    All day long, {who} worked hard and hummed a little song.
    {hero.his} house was small, but it always smelled of {food}.
    {who} had never been far from home.
    People said that no other {kind} in the whole land was as {trait} as {hero}.
weather:
    It was a quiet morning, and {sky}.
    That day {sky}, and {who} could not stay at home.
    When {hero} opened the door, {sky}.
    Outside, {sky}.
    {hero} noticed that {sky}.
treasure:
    {hero.he} had {thing.a}, and {hero.he} loved {thing.it} more than anything else.
    {who} owned {thing.a} that had once belonged to {hero.his} grandmother.
    On {hero.his} birthday, {hero} had been given {thing.a}.
    Wherever {hero} went, {hero.he} took {hero.his} {thing} along.
    {hero.his} greatest treasure was {thing.a}.
    Every night, {who} put {hero.his} {thing} next to the bed.
# What goes wrong, or what is longed for.
lose:
    {moment}, {hero} saw that {hero.his} {thing} {thing.was} gone.
    But {moment}, {who} lost {hero.his} {thing} somewhere {place.in}.
    Then, {moment}, the wind carried {hero.his} {thing} away, far {place.to}.
    {moment}, {hero} could not find {hero.his} {thing} anywhere.
    {moment}, {hero.his} {thing} disappeared without a trace.
steal:
    {moment}, {foe.a} came and stole {hero.his} {thing}.
    But at night, {foe.a} crept into the house and took {hero.his} {thing} away.
    {moment}, {who} saw {foe.a} flee {place.to} with {hero.his} {thing}.
    "Now I have your {thing}!" laughed {foe.a}, and ran off {place.to}.
wonder:
    {moment}, {hero} decided to see what there was to find {place.in}.
    For years, {who} had wanted to go {place.to}.
    {moment}, {hero} heard a strange story about {place}.
    "What may there be {place.in}?" {hero.he} often asked {hero.self}.
    {moment}, a letter came that said: go {place.to}, and do not be late.
wish:
    More than anything, {hero} wanted to learn to {skill}.
    {moment}, {hero} made up {hero.his} mind to learn how to {skill}.
    There was only one thing that {who} could not do, and that was {skill.ing}.
    All the others could {skill}, but {hero} could not.
    "I wish that I could {skill}," said {name} {sadly}.
cry:
    {moment}, {hero} heard a cry for help from {ftrait.a} {fkind} named {friend}.
    {moment}, {hero} heard that {fkind.a} named {friend} was lost {place.in}.
    {moment}, a bird brought the news that {friend} the {fkind} was trapped {place.in}.
    "Please help me, I am stuck {place.in}!" called {ftrait.a} {fkind} named {friend}.
alone:
    {hero} had a nice home, but {hero.he} had no friends.
    {moment}, {who} felt very lonely.
    There was nobody {hero} could play with, and that made {hero.him} sad.
    "I would love to have a friend," said {name} {sadly}.
birthday:
    Soon it would be the birthday of {new} and {hero} needed a gift.
    {moment}, {hero} wanted to give {hero.his} best friend, {fkind.a} named {friend}, a surprise.
    {hero.his} best friend was {ftrait.a} {fkind} named {friend}, who would soon have a birthday.
worry:
    {hero} was so sad that {hero.he} could not sleep.
    "Oh no, where {thing.is} my {thing}?" cried {name}.
    "What shall I do without my {thing}?" asked {hero} {sadly}.
    Without {hero.his} {thing}, {who} did not feel like singing.
    {hero.he} looked under the bed and behind the door, but there was nothing there.
    "I must get my {thing} back," said {name}.
fail:
    At first, {hero.he} tried it alone, but nothing worked.
    {who} tried again and again, but {skill.ing} was much harder than it looked.
    Some of the neighbors laughed when {who} tried to {skill}.
    "I will never be able to {skill}," said {hero} {sadly}.
    {hero} read a thick book about {skill.ing}, but it did not help.
# The journey.
depart:
    So {who} packed some {food} and went {place.to}.
    So {hero} put on {hero.his} coat and set out {manner}.
    The very same day, {who} walked {place.to}.
    {hero} took a deep breath and went {place.to} {manner}.
    "I am not afraid," said {name}, and {hero.he} went {place.to}.
    With {food} in {hero.his} bag, {hero} set out {place.to}.
travel:
    {hero.he} walked {hours}.
    The path was long, but {who} went on {manner}.
    On the way, {hero} sang a song to keep {hero.his} spirits up.
    {who} walked over seven hills and through three villages.
    After a while, {hero} sat down on a stone and ate some {food}.
    In the distance, {hero.he} could already see {place}.
    All around {hero.him}, it was quiet, and {sky}.
    {hero} asked everybody on the road, but nobody knew the way.
block:
    Soon {obstacle.a} blocked the way.
    But then {hero} came to {obstacle.a}.
    Suddenly, there was {obstacle.a} in front of {hero.him}.
    Between {hero} and {place} there was {obstacle.a}.
solve:
    {who} thought for a moment, and then {hero.he} {obstacle.solved}.
    {hero} did not give up, but {obstacle.solved}.
    "I can do it!" thought {name}, and {hero.he} {obstacle.solved}.
    {manner}, {hero} {obstacle.solved}.
block2:
    A little later, {hero.he} had to stop because of {trial.a}.
    Where the path turned, {trial.a} stood in the way.
    Farther on, {hero} came to {trial.a}.
solve2:
    But {who} had an idea: {hero.he} {trial.solved}.
    {hero} laughed, because {hero.he} knew what to do: {hero.he} {trial.solved}.
    It took {hero.him} a while, but in the end {hero} {trial.solved}.
night:
    When night fell, {who} slept under a tree and dreamed of {food}.
    In the night, {hero} lay awake and thought of home.
    That night, {hero} counted the stars until {hero.he} fell asleep.
    {hero.he} found a dry place for the night and waited for the morning.
# The helper.
meet:
    There {hero.he} met {new} and they began to talk.
    On the road, {hero} met {ftrait.a} {fkind} named {friend}.
    Then {who} saw {ftrait.a} {fkind} who was called {friend}.
    Suddenly, a voice said, "My name is {friend}, and I am {fkind.a}."
    Just then, {new} came along.
ask:
    "Why are you so quiet today?" asked {other}.
    "Can I help you, {hero}?" asked {other} {kindly}.
    "Where are you going?" asked {other}.
    {friend} looked at {hero} and asked what was wrong.
    "You look tired, my friend," said {other} {kindly}.
answer:
    "I am a long way from home," said {name}.
    {hero} told {friend} the whole story.
    "It is a long story," answered {name}, and {hero.he} told it from the beginning.
    "I could really use some help," said {hero} {sadly}.
    {hero} was glad that somebody listened to {hero.him}.
offer:
    "Then I will come with you," said {other} {kindly}.
    "Together we can do it!" cried {other}.
    {friend} took {hero} by the hand and said that everything would be all right.
    "Two can see more than one," said {other}.
    {other} shared {friend.his} {food} with {hero}, and at once the world looked brighter.
play:
    They played {place.in} {hours}.
    Together, {hero} and {friend} ate {food} and told each other stories.
    {friend} showed {hero} {friend.his} {thing}, and they laughed {hours}.
    {hero} and {friend} walked {place.to} and looked at the clouds.
    "Do you want to play with me?" asked {other}.
practice:
    They practiced {hours}, and every day it went a little better.
    "Do not give up, {hero}," said {other} {kindly}.
    {friend} knew a lot about {skill.ing} and showed {hero} every step.
    Day after day, {hero} and {friend} met {place.in} to practice.
    When {hero} made a mistake, {friend} only smiled and said that it did not matter.
# How it turns out.
find:
    At last, {hero.he} found {hero.his} {thing} {place.in}, under a heap of leaves.
    And there, right {place.in}, {thing.was} {hero.his} {thing}!
    {place.in}, something glittered in the grass, and it was {hero.his} {thing}.
    In the end, {who} found {hero.his} {thing} where nobody had looked before.
findboth:
    Together, {hero} and {friend} searched {hours}, and at last they found the {thing} {place.in}.
    "Look, there {thing.is} your {thing}!" cried {other}.
    It was {friend} who saw the {thing} first, high up in a tree.
    {friend} had found the {thing} {place.in} and gave {thing.it} back to {hero}.
discover:
    {place.in}, {hero.he} found {thing.a} that shone like the moon.
    And what did {hero} find {place.in}, if not {thing.a}?
    Behind a little door, {who} discovered {thing.a}.
    Deep under the ground, {hero.he} dug up an old box, and in it {thing.was} {thing.a}.
confront:
    "Give me back my {thing}!" said {hero} {manner}.
    {place.in}, {hero} found the {foe}, who was holding the {thing} tightly.
    "Why did you take my {thing}?" asked {hero}, but the {foe} did not answer.
    The {foe} sat {place.in} and looked at the {thing}.
repent:
    "I am sorry," said the {foe}, and gave the {thing} back.
    The {foe} was ashamed and gave {hero} the {thing}.
    The {foe} had only wanted a friend, so {hero} shared some {food} with the {foe}.
    When {hero} offered the {foe} some {food}, the {foe} began to cry and promised to be good.
rescue:
    {hero} found {friend} {place.in} and pulled {friend.him} out with a long rope.
    At last, {who} heard a weak voice and found {friend}, who was cold and hungry.
    "Hold on tight!" shouted {hero}, and {hero.he} carried {friend} all the way home.
    {hero} used {hero.his} {thing} to free {friend}.
succeed:
    And then, {moment}, {hero} could {skill} better than anybody else.
    "Look, I can {skill}!" cried {name}.
    At last, {hero.he} was able to {skill}, and everybody clapped.
    In the end, {hero} loved {skill.ing} so much that {hero.he} did it every day.
give:
    At the party, {hero} gave {friend} the {thing}.
    "{thing.this} {thing} {thing.is} for you," said {name}.
    When {friend} saw the {thing}, {friend.he} could not stop smiling.
    {hero} wrapped the {thing} in paper and gave {thing.it} to {friend}.
joy:
    {hero} was so happy that {hero.he} danced {hours}.
    "This is the best day of my life!" cried {name}.
    {who} laughed and jumped for joy.
    {hero} had never been so happy before.
    {hero.he} smiled from ear to ear.
    "I can hardly believe it," whispered {hero}, and smiled.
keep:
    {hero.he} held {hero.his} {thing} tight and smiled.
    {hero} promised never to let {hero.his} {thing} out of sight again.
    {who} put the {thing} safely into {hero.his} bag.
thanks:
    "Thank you, {friend}," said {name}.
    "I will never forget this," said {hero} to {friend}.
    {hero} thanked {friend} with all {hero.his} heart.
    "That is what friends are for," said {other} {kindly}.
pleased:
    "You are the best friend in the world, {hero}!" cried {other}.
    {friend} thanked {hero} again and again.
    {friend} hugged {hero} and would not let go.
    "How can I ever repay you?" asked {other}.
feast:
    In the evening, everyone ate {food}.
    They lit a fire, ate {food} and sang {hours}.
    The whole village came to the feast, and {hero} served {food}.
    That evening, {who} made {food} for all the neighbors.
moral:
    From that day on, {hero} knew that {lesson}.
    {hero} had learned that {lesson}.
    "Now I know that {lesson}," said {name}.
    So you see that {lesson}.
ending:
    And {who} lived happily ever after.
    Tired but happy, {hero} went home and fell asleep.
    And if nobody has woken {hero.him}, {hero.he} is still sleeping today.
    Since then, {hero} has told this story to everyone who comes by.
    {hero.he} went home, had some {food} and slept until noon.
    And that is the end of the story of {hero} the {kind}.
    The end.
together:
    From then on, {hero} and {friend} were the best of friends.
    And {hero} and {friend} lived happily ever after.
    If you go {place.to} today, you may see {hero} and {friend} there.
    Ever since, {hero} and {friend} have met every Sunday to eat {food}.
    The {kind} and the {fkind} never parted again.
    The end.
# A whole plot in one sentence, for very short stories.
gist:
    {moment}, {hero.he} lost {hero.his} {thing} {place.in}, but a kind {fkind} found {thing.it} again.
    {moment}, {hero.he} went {place.to} and found {thing.a}, which {hero.he} took home.
    {moment}, {foe.a} stole {hero.his} {thing}, but {hero} was clever and got {thing.it} back.
    {moment}, {hero.he} met {ftrait.a} {fkind} named {friend}, and they became friends.
    {hero.he} wanted to {skill}, and after a long winter of practice {hero.he} could.
""")
